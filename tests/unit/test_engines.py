"""States and scores of an LM that a server runs, on loopback, in the words of two engines."""

import base64
import json
from functools import cache

import numpy as np
import pytest
import torch
from conftest import SENTENCES, one_quick
from loopback import Handler, Loopback
from small_reranking import QUERIES, ROWS, TEMPLATE, TRAIN, WORDS, of_pairs, over_corpus
from test_endpoint import tls_context
from transformers import AutoModelForCausalLM

from pgra.cli import main
from pgra.context import Context
from pgra.errors import PgraError
from pgra.exemplars.selector import build_prompt
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments
from pgra.lm.causal_lm import CausalLM
from pgra.rerank.arguments import LikelihoodArguments, RerankArguments
from pgra.rerank.base import RerankRequest
from pgra.rerank.states import BankedReranker

EVERY = np.arange(len(SENTENCES))[None]


@cache
def stock_lm(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def stock_state(folder, ids):
    with torch.no_grad():
        return stock_lm(folder).base_model(torch.tensor([ids])).last_hidden_state[0, -1]


class Server(Loopback):
    """Serves a folder's LM in an engine's words, until `healthy` prompts were asked for states."""

    class handler(Handler):
        def do_GET(self):
            said = self.owner.answer(self.path, json.loads(self.read() or "{}"))
            status, said = (200, said) if said else (404, {"error": {"message": "no such thing"}})
            self.send(status, json.dumps(said).encode(), {"Content-Type": "application/json"})

        do_POST = do_GET

    fault, healthy, echoed = None, 0, 0

    def __init__(self, folder):
        self.folder, self.engine, self.asked = str(folder), "vllm", []

    def answer(self, path, body):
        fault = self.fault if len(self.asked) >= self.healthy else None
        if path == "/v1/models":
            model = "another" if fault == "model" else "toy"
            return {"data": [{"id": model, "owned_by": self.engine, "root": self.folder}]}
        if path in ("/version", "/get_server_info"):
            return {"version": "1.0"}
        if path == "/v1/completions":
            asked, text = body["prompt"], {"text": " warm", "finish_reason": "stop"}
            lines = [] if asked == "Q" else enumerate(map(self.echo, asked))
            return {"choices": [{"index": i, **line} for i, line in lines][::-1] or [text]}
        if path == "/tokenize" or fault == "none":
            return None
        ids = body.get("input") or body["input_ids"]
        self.asked += ids
        states = [stock_state(self.folder, one).numpy() for one in ids]
        states = fault(states) if callable(fault) else states
        if self.engine == "sglang":
            return [{"meta_info": {"hidden_states": state.tolist()}} for state in states]
        coded = [base64.b64encode(state.tobytes()).decode() for state in states]
        return {"data": [{"index": i, "embedding": x} for i, x in enumerate(coded)][::-1]}

    def echo(self, ids):
        chances = stock_lm(self.folder)(torch.tensor([ids])).logits[0, :-1].log_softmax(1)
        own = chances[range(len(ids) - 1), ids[1:]].tolist()
        return {"logprobs": {"token_logprobs": [None, *own, -1.0][-self.echoed :]}}


@pytest.fixture
def server(lm_dirs, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("ssl.create_default_context", tls_context)  # takes longer than most tests
    return Server(lm_dirs["opt"])


@pytest.fixture
def open_at(corpus, tmp_path):
    """Open a reranker whose LM is at an address."""
    prompt = build_prompt(TEMPLATE, TRAIN, WORDS, num_exemplars=4, seed=0)

    def open_at(lm, **how):
        how = {"similarity": "dot", **how}
        args = RerankArguments(lm=lm, bank_shard_rows=5, lm_dtype="float32", **how)
        how = {"corpus": corpus, "context": Context(artifacts=tmp_path)}
        return BankedReranker(RerankRequest(args=args, prompt=prompt, **how))

    return open_at


@pytest.mark.parametrize("engine", one_quick(["vllm", "sglang"], "vllm"))
def test_its_states_give_the_scores_of_transformers(server, open_at, corpus, tmp_path, engine):
    server.engine, more = engine, {"lm_tokenizer": server.folder, "lm_reference": server.folder}
    own = over_corpus(server.folder, corpus, tmp_path / "own")
    with server.serve() as url:
        ours = open_at(url, **more)
        assert [lm.prepare(QUERIES, ROWS).num_new for lm in (own, ours)] == [12, 12]
        np.testing.assert_allclose(*(x.score_rows(QUERIES, ROWS) for x in (own, ours)), rtol=1e-4)
        assert open_at(f"{url}/", **more).prepare(QUERIES, ROWS).num_new == 0


def turned(states):
    return [state[::-1].copy() for state in states]


FAULTS = {
    "none": ("none", 0, "404"),
    "half": (lambda states: states[:1], 3, "3 .*1"),
    "normalised": (lambda states: [s / np.linalg.norm(s) for s in states], 0, "normalises"),
    "width": (lambda states: [s[:-1] for s in states], 18, "LM"),
    "model": ("model", 18, "another"),
    "values": (turned, 18, "1 of 1"),
}


@pytest.mark.parametrize("name", one_quick(list(FAULTS), "normalised"))
def test_a_server_that_fails_is_refused_and_whole_shards_stay(server, open_at, name):
    server.fault, server.healthy, said = FAULTS[name]
    with server.serve() as url:
        with pytest.raises(PgraError, match=said):
            open_at(url).prepare(QUERIES, EVERY)
        server.fault = None
        new = EVERY.size - 5 if server.healthy == 18 else 3 + EVERY.size  # less what was kept
        assert open_at(url).prepare(QUERIES, EVERY).num_new == new
        server.fault, server.healthy = turned, 0
        with pytest.raises(PgraError):
            open_at(url).prepare([*QUERIES, TRAIN[0]], EVERY)


def test_scores_and_written_answers_are_the_servers_too(server, corpus, tmp_path):
    how = LikelihoodArguments(), corpus, tmp_path
    with server.serve() as url:
        opened = [of_pairs("likelihood", *how, lm=lm) for lm in (server.folder, url)]
        assert [lm.prepare(QUERIES, ROWS).num_new for lm in opened] == [11, 11]
        np.testing.assert_allclose(*(lm.score_rows(QUERIES, ROWS) for lm in opened), rtol=1e-4)
        args = CompleterArguments(lm=url, endpoint="completions")
        lm = open_lm(args, Context(artifacts=tmp_path))
        assert lm.complete(["Q"], max_new_tokens=1, stop="\n")[0].text == " warm"


def test_a_cut_lms_last_states_are_those_of_the_depth(lm_dirs, tmp_path):
    folder = str(lm_dirs["llama"])
    words = ["lm", "cut", folder, "1", str(tmp_path / "cut")]
    assert [main(words), main(words)] == [0, 2]  # there already
    opened = [CausalLM(tmp_path / "cut"), CausalLM(folder, layer="1"), CausalLM(folder)]
    cut, depth, last = (lm.states([[5, 6, 7]]) for lm in opened)
    np.testing.assert_allclose(cut, depth, rtol=1e-6)
    assert abs(cut - last).max() > 1e-3  # the control
