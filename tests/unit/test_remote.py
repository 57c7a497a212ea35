"""An LM behind a real endpoint on loopback: kept answers, limits, failures and costs."""

import json
import logging
import subprocess
import sys
import textwrap
import threading

import pytest
from loopback_endpoint import Fault, LoopbackEndpoint, busy, says

from pgra.errors import ConfigError, ModelError
from pgra.lm import remote as pacing
from pgra.lm.cache import AnswersCache
from pgra.lm.remote import (
    Endpoint,
    Prices,
    RemoteCompleter,
    Spending,
    TokenCounter,
    estimate_tokens,
)

KEY = "sk-proj-VerySecret0123456789abcdef"
PROMPTS = ["Q: red", "Q: green", "Q: blue", "Q: grey"]
TEXTS = [" red", " green", " blue", " grey"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(pacing, "_FIRST_DELAY", 0.01)


@pytest.fixture
def server():
    return LoopbackEndpoint()


@pytest.fixture(scope="module")
def first_client():
    """A client, whose copies share its TLS context: to make one takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        client = Endpoint.open("toy", base_url="http://127.0.0.1:9/v1").client
    yield client
    client.close()


@pytest.fixture
def open_at(tmp_path, first_client):
    """Open completers on endpoints, given or by their address."""

    def open_one(place, *, timeout=20.0, **options):
        if isinstance(place, str):
            client = first_client.copy(base_url=place, timeout=timeout)
            place = Endpoint("toy", place, client)
        return RemoteCompleter(place, AnswersCache(tmp_path), window=64, **options)

    return open_one


def complete(completer, prompts=PROMPTS, **options):
    done = []
    answers = completer.complete(
        prompts, max_new_tokens=4, stop="\n", advance=done.append, **options
    )
    assert sum(done) == len(prompts)
    return [answer.text for answer in answers]


def test_answers_come_in_the_order_of_prompts_and_are_cut_at_the_stop(server, open_at):
    server.writer = slow_first
    with server.serve() as url:
        assert complete(open_at(url)) == TEXTS


def slow_first(prompt, max_tokens, stop):
    from loopback_endpoint import toy_writer

    if prompt == PROMPTS[0]:
        threading.Event().wait(0.1)
    return toy_writer(prompt, max_tokens, None)  # which writes on after the stop


def test_the_request_is_greedy_and_complete(server, open_at):
    with server.serve() as url:
        complete(open_at(url), ["Q: red"])
        open_at(url).complete(["Q: red"], max_new_tokens=4, stop="")
    asked = {"model": "toy", "prompt": "Q: red", "temperature": 0, "max_tokens": 4}
    path = {"path": "/v1/completions"}
    assert server.bodies == [path | asked | {"stop": ["\n"]}, path | asked]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_equal_prompts_are_asked_once(server, open_at):
    with server.serve() as url:
        assert complete(open_at(url), ["Q: red"] * 5) == [" red"] * 5
    assert len(server.bodies) == 1


def test_what_is_on_disk_is_never_asked_again(server, open_at):
    with server.serve() as url:
        complete(open_at(url), PROMPTS[:2])
        again = open_at(url)
        assert complete(again) == TEXTS
        assert sorted(str(body["prompt"]) for body in server.bodies) == sorted(PROMPTS)
        assert (again.spending.num_calls, again.spending.num_kept) == (2, 2)
        again.complete(PROMPTS, max_new_tokens=5, stop="\n")  # the control: another question
    assert len(server.bodies) == 8


def test_only_so_many_calls_are_under_way_at_a_time(server, open_at):
    server.seconds = 0.05
    prompts = [f"Q: {i}" for i in range(9)]
    with server.serve() as url:
        complete(open_at(url, max_parallel_calls=3), prompts)
        assert 2 <= server.most_at_once <= 3
        server.most_at_once = 0
        complete(open_at(url, max_parallel_calls=1), [f"{prompt}!" for prompt in prompts])
        assert server.most_at_once == 1


def test_a_limit_a_minute_spreads_the_calls(server, open_at):
    with server.serve() as url:
        complete(open_at(url, requests_per_minute=60 / 0.06))
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert sum(gaps) >= 0.06 * 3 - 0.03


@pytest.mark.parametrize(
    "fault",
    [
        *(busy(), busy(None), says("down", 500), says("<html>bad gateway</html>", 502), Fault()),
        *(Fault(503, b"{}", {"Retry-After": "0.02"}), Fault(408)),
    ],
)
def test_a_hiccup_is_tried_again_and_counted(server, open_at, fault):
    server.faults = [fault, fault]
    with server.serve() as url:
        completer = open_at(url)
        assert complete(completer) == TEXTS
    assert completer.spending.num_retries == 2
    assert completer.spending.num_calls == 4


def test_the_pause_an_endpoint_asks_for_is_kept(server, open_at):
    server.faults = [busy("0.15")]
    with server.serve() as url:
        complete(open_at(url), ["Q: red"])
    assert server.times[1] - server.times[0] >= 0.15


def test_an_answer_that_does_not_come_is_asked_for_again(server, open_at):
    server.faults = [Fault(seconds=20.0)]
    with server.serve() as url:
        completer = open_at(url, timeout=0.5)
        assert complete(completer, ["Q: red"]) == [" red"]
        assert completer.spending.num_retries >= 1
        server.faults = [Fault(seconds=20.0)]
        with pytest.raises(ModelError, match=r"did not answer in 0.5 s \(--request_timeout\) \(1"):
            complete(open_at(url, timeout=0.5, max_retries=0), ["Q: green"])


def test_an_endpoint_that_dies_loses_no_answer(server, open_at):
    server.dies_after = 2
    with server.serve() as url:
        told = r"cannot be reached \(.*\) \(2 tries\)\. 2 new answers are in .*answers\.sqlite"
        with pytest.raises(ModelError, match=told):
            complete(open_at(url, max_parallel_calls=1, max_retries=1))
        server.dies_after = None
        assert complete(open_at(url)) == TEXTS
    answered = [str(body["prompt"]) for body in server.bodies]
    assert [answered.count(prompt) for prompt in PROMPTS] == [1, 1, 3, 1]


def test_after_a_failure_no_further_call_is_made(server, open_at):
    server.faults = [says("no", 400)]
    with server.serve() as url, pytest.raises(ModelError, match="answered 400 'no'"):
        complete(open_at(url, max_parallel_calls=1))
    assert len(server.bodies) == 1


def test_nobody_there_is_told(open_at):
    with pytest.raises(ModelError, match=r"^openai:toy at http://127.0.0.1:9/v1 cannot be reached"):
        complete(open_at("http://127.0.0.1:9/v1", max_retries=0))


def error_of(message, code=None):
    return json.dumps({"error": {"message": message, "code": code}})


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (says("<html>Welcome</html>"), r"answered '<html>Welcome</html>', which is no completion"),
        (says("{"), "which is no completion: is --base_url"),
        (says('{"choices": []}'), "which is no completion"),
        (says('{"choices": [{"text": null}]}'), "which is no completion"),
        (says('{"choices": [{"message": {"content": "hi"}}]}'), "which is no completion"),
        (says("[1]"), "which is no completion"),
        (says(error_of("bad key"), 401), "answered 401 'bad key': see that OPENAI_API_KEY is set"),
        (says(error_of("no model"), 404), "answered 404 'no model': see --base_url"),
        (says(error_of("too long"), 400), "answered 400 'too long': see that --lm_window"),
        (says(error_of("pay", "insufficient_quota"), 429), "'pay': the account has no money left"),
        (busy("3600"), "answered 429 'slow down', and asks to wait 3600 s"),
    ],
)
def test_what_trying_again_does_not_mend_is_told_at_once(server, open_at, fault, told):
    server.faults = [fault]
    with server.serve() as url, pytest.raises(ModelError, match=told) as caught:
        complete(open_at(url), ["Q: red"])
    assert len(server.bodies) == 1
    assert "\n" not in str(caught.value)


def test_words_are_scored_from_the_echoed_prompt(server, open_at):
    words = [" great", " not so good"]
    with server.serve() as url:
        completer, done = open_at(url), []
        scores = completer.score(PROMPTS[:2], words, advance=done.append)
        # the toy writer's tokens are words, and their chances minus a quarter of their length
        assert scores == [[-1.5, -(4 + 3 + 5) / 4]] * 2
        assert done == [1, 1]
        assert len(server.bodies) == 4
        assert server.bodies[0]["max_tokens"] == 1
        assert open_at(url).score(PROMPTS[:2], words) == scores
    assert len(server.bodies) == 4


def test_one_text_as_two_prompts_and_words_is_two_questions(server, open_at):
    with server.serve() as url:
        completer = open_at(url)
        assert completer.score(["It was"], [" so good"]) == [[-2.0]]
        assert completer.score(["It was so"], [" good"]) == [[-1.25]]


def test_an_endpoint_that_scores_no_words_is_told_with_the_way_out(server, open_at):
    server.faults = [says(error_of("echo is not supported"), 400)]
    with server.serve() as url:
        with pytest.raises(ModelError, match=r"does not score given words.*--decide_by generation"):
            open_at(url).score(["It was"], [" good"])
        server.faults = [says('{"choices": [{"text": " yes"}]}')]
        with pytest.raises(ModelError, match=r"toy at .* does not echo a prompt.*--decide_by gen"):
            open_at(url).score(["It was"], [" good"])


def test_tokens_and_their_price_are_counted(server, open_at):
    with server.serve() as url:
        completer = open_at(url, prices=Prices(prompt=2.0, new=8.0))
        answer = completer.complete(["Q: my red"], max_new_tokens=4, stop="\n")[0]
        assert (answer.num_prompt_tokens, answer.num_new_tokens) == (3, 1)
        completer.complete(["Q: my red", "Q: blue"], max_new_tokens=4, stop="\n")
        spent = completer.spending
        assert spent == Spending(2, 1, 0, 5, 2, cost=(5 * 2 + 2 * 8) / 1e6)
        assert open_at(url).spending == Spending()
        server.faults = [says('{"choices": [{"text": " yes"}]}')]  # without counts
        other = open_at(url)
        answer = other.complete(["123456"], max_new_tokens=4, stop="")[0]
        assert (answer.num_prompt_tokens, answer.num_new_tokens) == (2, 2)  # a token for 3 bytes
        assert other.spending.is_estimated
        assert "about 2 prompt tokens" in str(other.spending)
    assert "cost 0.0000" in str(spent)


def test_tokens_are_estimated_or_counted_by_a_tokenizer(open_at):
    url = "http://127.0.0.1:9/v1"
    assert open_at(url).count_tokens(["", "abc", "abcd", "é!"]) == [0, 1, 2, 1]
    counter = TokenCounter("mine", lambda texts: [7 for _ in texts])
    named = open_at(url, counter=counter)
    assert named.count_tokens(["", "abc"]) == [7, 7]
    assert named.fingerprint != open_at(url).fingerprint
    assert estimate_tokens(["abcdef"]) == [2]


def test_the_fingerprint_names_model_and_endpoint(open_at):
    endpoint = Endpoint.open("toy", base_url="http://127.0.0.1:9/v1/")
    told = open_at(endpoint).fingerprint
    endpoint.client.close()
    assert told == {
        "lm": "openai:toy",
        "base_url": "http://127.0.0.1:9/v1",
        "window": 64,
        "tokens": "estimate",
    }


def test_the_key_is_nowhere(server, open_at, tmp_path, caplog, capfd):
    """Not in errors, though endpoints quote it; not in logs of any level, reprs or files."""
    caplog.set_level(logging.DEBUG)
    quoted = f"Incorrect API key provided: {KEY}. or {KEY[:9]}*****cdef, " + "x" * 190 + KEY
    server.faults = [busy(), Fault(), says(quoted, 500)]
    told = []
    with server.serve() as url:
        completer = open_at(url)
        complete(completer)
        for fault in (says(error_of(quoted), 401), says(quoted), says(quoted, 400)):
            server.faults = [fault]
            with pytest.raises(ModelError, match=r"\*\*\*") as caught:
                complete(completer, ["Q: another"])
            told.append(f"{caught.value!r} {caught.value.__context__!r}")
    told += [caplog.text, *capfd.readouterr(), repr(vars(completer)), repr(completer._endpoint)]
    told += [str(completer.fingerprint)]
    told += [path.read_bytes().decode("latin1") for path in tmp_path.iterdir()]
    assert len(caplog.text) > 1000  # the control: the libraries did log
    assert [text for text in told if "VerySecret" in text or KEY[:9] in text] == []


def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(monkeypatch):
    for key in ("sk-my key", "sk-ключ", "sk-two\nlines"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ConfigError, match="OPENAI_API_KEY holds characters") as caught:
            Endpoint.open("toy", base_url="http://127.0.0.1:9/v1")
        assert "sk-" not in str(caught.value)


def test_an_endpoint_of_ones_own_needs_no_key(server, open_at, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "")
    with server.serve() as url:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        endpoint = Endpoint.open("toy")
        assert endpoint.base_url == url
        assert complete(open_at(endpoint), ["Q: red"]) == [" red"]
        endpoint.client.close()
    assert KEY not in server.headers[0]["authorization"]
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(ConfigError, match=r"openai:toy needs a key in the environment"):
        Endpoint.open("toy")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:8000/v1", "'127.0.0.1:8000/v1' is no address: write http"),
        ("ftp://there/v1", "is no address"),
        ("http://there:port/v1", "is no address"),
        ("http:///v1", "is no address"),
        ("https://me:Secret@there/v1", "holds a user name, a password or a query"),
        ("https://there/v1?key=Secret", "holds a user name, a password or a query"),
    ],
)
def test_an_address_that_cannot_be_is_refused(url, told):
    with pytest.raises(ConfigError, match=told) as caught:
        Endpoint.open("toy", base_url=url)
    assert "Secret" not in str(caught.value)


def test_a_key_over_plain_http_to_elsewhere_is_told(caplog):
    Endpoint.open("toy", base_url="http://127.0.0.1:9/v1").client.close()
    assert "plain http" not in caplog.text
    Endpoint.open("toy", base_url="http://models.invalid/v1").client.close()
    assert "the key goes to http://models.invalid/v1 over plain http" in caplog.text
    with pytest.raises(ConfigError, match="names no model"):
        Endpoint.open("", base_url="http://127.0.0.1:9/v1")


ASKER = """
    import sys
    from pathlib import Path
    from pgra.lm.open import CompleterArguments, open_completer
    args = CompleterArguments(lm="openai:toy", base_url=sys.argv[1], max_parallel_calls=2)
    completer = open_completer(args, artifacts=Path(sys.argv[2]))
    print("openai" in sys.modules, "torch" in sys.modules, flush=True)
    completer.complete([f"Q: {i}" for i in range(20)], max_new_tokens=4, stop="\\n")
"""


def test_a_killed_run_goes_on_without_paying_twice(server, open_at, tmp_path):
    server.seconds = 0.05
    prompts = [f"Q: {i}" for i in range(20)]
    with server.serve() as url:
        words = [sys.executable, "-c", textwrap.dedent(ASKER), url, str(tmp_path)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout.readline() == "True False\n"  # an endpoint needs no torch
            while server.num_answered < 6:
                assert killed.poll() is None
                threading.Event().wait(0.01)
            killed.kill()
        server.seconds = 0.0
        paid = server.num_answered
        answers = AnswersCache(tmp_path / "answers")
        assert paid - 2 <= len(answers) <= paid < 20
        again = RemoteCompleter(open_at(url)._endpoint, answers, window=64)
        assert complete(again, prompts) == [f" {i}" for i in range(20)]
    asked = [str(body["prompt"]) for body in server.bodies]
    twice = [prompt for prompt in set(asked) if asked.count(prompt) > 1]
    assert len(twice) <= 2  # those on their way when it was killed
    assert len(asked) == again.spending.num_calls + paid == 20 + len(twice)
