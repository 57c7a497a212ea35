"""An LM is opened by its name: here, or behind an endpoint; contradictions are refused before."""

import pytest

from pgra.core import Context, Worker
from pgra.errors import ConfigError, ModelError
from pgra.lm.local import LocalCompleter
from pgra.lm.open import CompleterArguments, open_completer, open_counter, open_kept_completer
from pgra.lm.remote import Prices, RemoteCompleter

URL = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")


def test_a_name_opens_an_lm_here_with_its_window_or_a_smaller_one(lm_dirs, tmp_path):
    name = str(lm_dirs["gpt2"])
    lm = open_completer(CompleterArguments(lm=name), artifacts=tmp_path, device="cpu")
    assert isinstance(lm, LocalCompleter)
    args = CompleterArguments(lm=name, lm_window=lm.window - 1)
    assert open_completer(args, artifacts=tmp_path, device="cpu").window == lm.window - 1
    args = CompleterArguments(lm=name, lm_window=lm.window + 1)
    with pytest.raises(
        ConfigError, match=f"lm_window is {lm.window + 1}, and .* reads {lm.window}"
    ):
        open_completer(args, artifacts=tmp_path, device="cpu")


def test_a_prefix_opens_an_endpoint_that_keeps_its_answers_among_the_artifacts(tmp_path):
    args = CompleterArguments(lm="openai:some/model:v2", base_url=URL, lm_window=777)
    completer = open_completer(args, artifacts=tmp_path)
    assert isinstance(completer, RemoteCompleter)
    assert completer.fingerprint["lm"] == "openai:some/model:v2"
    assert completer.window == 776  # one for the token that scoring has written
    assert completer.answers.path == tmp_path / "answers" / "answers.sqlite"
    assert list(tmp_path.iterdir()) == []  # nothing was asked yet
    untold = CompleterArguments(lm="openai:m", base_url=URL)
    assert open_completer(untold, artifacts=tmp_path).window == 2047


def test_an_endpoint_is_asked_by_one_process(tmp_path, lm_dirs):
    pair = Context(Worker(1, 2))
    far = CompleterArguments(lm="openai:m", base_url=URL)
    with pytest.raises(ConfigError, match="which one process asks, and there are 2: start it"):
        open_kept_completer(far, artifacts=tmp_path, context=pair)
    open_kept_completer(far, artifacts=tmp_path)  # the controls: one, and an LM that is here
    here = CompleterArguments(lm=str(lm_dirs["gpt2"]))
    open_kept_completer(here, artifacts=tmp_path, device="cpu", context=pair)


def test_a_tokenizer_counts_an_endpoints_prompts(lm_dirs, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):  # no weights
        (folder / name).write_bytes((lm_dirs["opt"] / name).read_bytes())
    args = CompleterArguments(lm="openai:m", base_url=URL, tokenizer=str(folder))
    completer = open_completer(args, artifacts=tmp_path)
    local = LocalCompleter.from_name(str(lm_dirs["opt"]), device="cpu")
    texts = ["The film is", "", "A dull, lifeless story"]
    assert completer.count_tokens(texts) == local.count_tokens(texts)
    assert completer.count_tokens([]) == []
    assert len(str(completer.fingerprint["tokens"])) == 64
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        open_counter(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lm": "gpt2", "base_url": URL}, "base_url is for an endpoint, and --lm gpt2 is none"),
        ({"lm": "gpt2", "tokenizer": "gpt2"}, "tokenizer is for an endpoint"),
        ({"max_parallel_calls": 0}, "max_parallel_calls is 0: it must be at least 1"),
        ({"max_retries": -1}, "max_retries is -1: it must be at least 0"),
        ({"requests_per_minute": 0.0}, "requests_per_minute is 0.0: it must be above 0"),
        ({"request_timeout": float("nan")}, "request_timeout is nan: it must be above 0"),
        ({"lm_window": 0}, "lm_window is 0"),
        ({"lm_dtype": "int3"}, "unknown lm_dtype 'int3'"),
        ({"price_per_million_input": 1.0}, "price_per_million_output go together: give both"),
        (
            {"price_per_million_input": 1.0, "price_per_million_output": -1.0},
            "price_per_million_output is -1.0: it must be at least 0",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        CompleterArguments(**{"lm": "openai:m", **changes})


def test_prices_reach_the_completer(tmp_path):
    args = CompleterArguments(
        lm="openai:m", base_url=URL, price_per_million_input=0.5, price_per_million_output=2.0
    )
    assert args.prices == Prices(0.5, 2.0)
    assert open_completer(args, artifacts=tmp_path).spending.cost == 0.0
    assert CompleterArguments(lm="openai:m").prices is None
