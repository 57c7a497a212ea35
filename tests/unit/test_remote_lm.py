"""An LM answers the same behind an endpoint as here."""

import pytest
from endpoint_lm import lm_writer
from loopback_endpoint import LoopbackEndpoint, busy

from pgra.lm.causal_lm import CausalLM
from pgra.lm.local import LocalCompleter
from pgra.lm.open import CompleterArguments, open_completer

PROMPTS = [
    "The film is a warm",
    "The river flows through the city, and the boats came home early. The answer is",
    "He was born in",
]
WORDS = [" great", " terrible", " not great"]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Give an LM here, and the same one behind an endpoint."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    opened = []

    def open_both(name, server, url):
        lm = CausalLM.from_name(name, device="cpu", with_head=True)
        server.writer = lm_writer(lm)
        args = CompleterArguments(lm="openai:lm", base_url=url, tokenizer=name)
        remote = open_completer(args, artifacts=tmp_path)
        opened.append(remote._endpoint.client)
        return LocalCompleter(lm), remote

    yield open_both
    for client in opened:
        client.close()


def check_agreement(local, remote, *, stop):
    mine, theirs = (lm.complete(PROMPTS, max_new_tokens=8, stop=stop) for lm in (local, remote))
    assert [a.text for a in theirs] == [a.text for a in mine]
    assert [a.num_prompt_tokens for a in theirs] == local.count_tokens(PROMPTS)
    assert remote.count_tokens(PROMPTS) == local.count_tokens(PROMPTS)
    scores = remote.score(PROMPTS, WORDS)
    for told, expected in zip(scores, local.score(PROMPTS, WORDS), strict=True):
        assert told == pytest.approx(expected, abs=1e-3)
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)  # the control: prompts matter


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_an_lm_answers_the_same_behind_an_endpoint(lm_dirs, serve, kind):
    server = LoopbackEndpoint()
    with server.serve() as url:
        local, remote = serve(str(lm_dirs[kind]), server, url)
        server.faults = [busy("0.01")]
        check_agreement(local, remote, stop=" the")
        assert remote.spending.num_calls == len(PROMPTS) * (1 + len(WORDS))


@pytest.mark.slow
def test_the_bundled_lm_answers_the_same_behind_an_endpoint(serve):
    # On one thread: each of the server's threads would bring a pool of its own.
    server = LoopbackEndpoint()
    with server.serve() as url:
        local, remote = serve("bundled:smollm2-135m", server, url)
        server.faults = [busy("0.01")]
        check_agreement(local, remote, stop="\n")
