"""The servers for other tools: `pgra serve` over HTTP, `pgra mcp` over stdio."""

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from functools import partial

import httpx
import pytest
from conftest import SENTENCES
from starlette.requests import Request
from starlette.testclient import TestClient

import pgra
from pgra.cli import main
from pgra.commands import serve
from pgra.errors import ModelError
from pgra.integrations.systemone import Decider
from pgra.types import Hit, as_texts

QUERY = "red apples"
TOPIC = {"type": "choice", "instructions": "What is it?", "criteria": {"art": None, "life": "a"}}


class Lengths:
    """Orders documents by their length; a name of an error raises it."""

    def rank(self, query, documents, k=None):
        if query == "break":
            raise ValueError("no padding\ntoken")  # as a library's
        if query == "texts":
            as_texts("documents", [1])  # refused by our own code
        if query == "refuse":
            raise ModelError("no room: use a smaller model")
        hits = [Hit(place, len(text) - 5.0, text) for place, text in enumerate(documents)]
        return sorted(hits, key=lambda hit: -hit.score)[:k]


def open_client(token="", **headers):
    doors = {"rerank": (serve.RerankBody, partial(serve.rerank, Lengths(), "toy"))}
    app = serve.build_app(doors, ["127.0.0.1"], token)
    return TestClient(app, "http://127.0.0.1", raise_server_exceptions=False, headers=headers)


def test_a_rerank_is_as_coheres_and_jinas_clients_send_and_read_it():
    texts, client = ["a", "abcdefgh", "abc"], open_client()
    results = [(1, 3.0), (2, -2.0)]
    logistic = [{"index": i, "relevance_score": 1 / (1 + math.exp(-x))} for i, x in results]
    asked = {"model": "any", "query": QUERY, "documents": texts, "top_n": 2}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        found = client.post(path, json={**asked, "rank_fields": ["text"]}).json()
        assert found["model"] == "toy"
        assert found["usage"] == {"total_tokens": 0}
        assert found["results"] == [pytest.approx(one) for one in logistic]
    for path in ("/xyzrerank", "//rerank", "/v1//rerank", "/x/rerank"):
        assert client.post(path, json=asked).status_code == 404
    for more in ({"return_documents": "true", "return_len": "true"}, {"return_documents": True}):
        given = [{"text": text, "id": 1} for text in texts]
        found = client.post("/v1/rerank", json={**asked, "documents": given, **more}).json()
        shown = [one["document"] for one in found["results"]]
        assert shown == [{"text": texts[1]}, {"text": "abc"}]


BAD = {
    b"{": (422, "truncated"),
    b'{"query": "a"}': (422, "`documents`"),
    b'{"query": "a", "documents": []}': (422, "length >= 1"),
    b'{"query": "a", "documents": ["a"], "top_n": 0}': (422, ">= 1"),
    b'{"query": "a", "documents": [%s"a"]}' % (b'"a", ' * 2048): (422, "length <= 2048"),
    b'{"query": "%s"}' % (b"a" * (16 << 20)): (413, "bytes"),
    b'{"query": "refuse", "documents": ["a"]}': (500, "no room: use a smaller model"),
    b'{"query": "break", "documents": ["a"]}': (500, "ValueError: no padding token"),
    b'{"query": "texts", "documents": ["a"]}': (422, "documents[0] is 1"),
    b'{"query": "a", "documents": ["a"], "x": %s' % (b"[" * 100_000): (422, "recursion"),
}


def test_what_is_wrong_is_one_line(caplog):
    client = open_client()
    for body, (code, part) in BAD.items():
        answer = client.post("/v1/rerank", content=body)
        assert answer.status_code == code, body[:80]
        assert part in answer.json()["message"]
        assert (part in caplog.text) == (code == 500)  # the server's fault
    assert client.get("/v1/rerank").status_code == 405
    assert client.post("/v1/search", json={"query": "a"}).json()["message"] == "Not Found"
    assert client.post("/v1/rerank", headers={"host": "evil.example"}).status_code == 400


async def stay():
    await asyncio.sleep(60)


async def leave():
    return {"type": "http.disconnect"}


def test_work_is_done_in_turn(monkeypatch):
    monkeypatch.setattr(serve, "_MOST_WAITING", 3)
    monkeypatch.setattr(serve, "_MOST_SECONDS", 0.01)
    done = []

    async def ask():
        requests = [Request({"type": "http"}, client) for client in (stay, leave, stay, stay)]
        turns = serve.Turns()
        answers = [turns.answer(one, partial(done.append, n)) for n, one in enumerate(requests)]
        answers.append(serve.read_body(requests[0]))
        return await asyncio.gather(*answers, return_exceptions=True)

    *_, refused, late = asyncio.run(ask())
    assert done == [0, 2]
    assert (refused.status_code, late.status_code) == (503, 408)


def test_a_token_is_asked_for_and_must_be_there_beyond_this_machine(monkeypatch, tmp_path):
    for given, code in (
        *(("Bearer sesame", 200), ("Basic bWU6c2VzYW1l", 200)),  # me:sesame
        *(("Bearer sesam", 401), ("Basic !", 401), ("", 401), ("Bearer é", 401)),
    ):
        client = open_client("sesame")
        headers = {"authorization": given.encode()} if given else {}
        asked = {"query": QUERY, "documents": ["a"]}
        assert client.post("/v1/rerank", json=asked, headers=headers).status_code == code, given
    monkeypatch.delenv("PGRA_TOKEN", raising=False)
    assert main(["serve", "--host", "0.0.0.0", "--lm", "x"]) == 2
    monkeypatch.setenv("PGRA_TOKEN", "sésame")
    assert main(["serve", "--lm", "x"]) == 2
    monkeypatch.delenv("PGRA_TOKEN")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--memory", "memory.sqlite", "--port", str(port)]) == 2
    assert not any(tmp_path.iterdir())  # nothing was opened before


@contextlib.contextmanager
def served(*words, **environment):
    """Serve by a process; gives a client, when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pgra", "serve", "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen([*command, *map(str, words)], env={**os.environ, **environment})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=180) as client:
            while process.poll() is None:
                with contextlib.suppress(httpx.ConnectError):
                    client.get("/")
                    break
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_a_process_gives_what_the_library_gives(lm_dirs, encoder_dir, tmp_path):
    lm, index = str(lm_dirs["opt"]), tmp_path / "index"
    own = pgra.Index.build(SENTENCES, encoder=str(encoder_dir), path=index, device="cpu")
    hits = pgra.Reranker(lm, by="likelihood", device="cpu").rank(QUERY, SENTENCES, k=5)
    words = ["--lm", lm, "--index_dir", index, "--memory", tmp_path / "memory.sqlite"]
    decider = Decider(pgra.CausalLM(lm, device="cpu"))
    decider.learn(QUERY, TOPIC, "art")
    decided = decider.answer(SENTENCES[5], {"topic": TOPIC})["topic"]["probabilities"]
    with served(*words, PGRA_TOKEN="sesame") as client:
        asked = {"query": QUERY, "documents": SENTENCES, "top_n": 5}
        assert client.post("/v1/rerank", json=asked).status_code == 401
        client.headers["authorization"] = "Bearer sesame"
        found = client.post("/v1/rerank", json=asked).json()["results"]
        assert [one["index"] for one in found] == [hit.index for hit in hits]
        found = client.post("/v1/search", json={"query": QUERY, "k": 3}).json()["results"]
        assert [one["text"] for one in found] == [hit.text for hit in own.search(QUERY, k=3)]
        body = {"state": QUERY, "question": TOPIC, "answer": "art"}
        assert client.post("/v1/feedback", json=body).json() == {"answer": "art"}
        asked = {"state": SENTENCES[5], "questions": {"topic": TOPIC}, "model": "jev-latest"}
        found = client.post("/v1/systemone", json=asked).json()["answers"]["topic"]
        assert found["probabilities"] == pytest.approx(decided, abs=1e-5)
        wrong = client.post("/v1/systemone", json={**asked, "questions": {"x": {"type": "yes"}}})
        assert wrong.status_code == 422
        assert "type" in wrong.json()["detail"][0]["msg"]
        assert "In the memory: 0" in client.get("/").text


# Agents, by the SDK's own client.


async def talk(server, *calls):
    """Call tools one after the other; give each one's answer, or its error."""
    from mcp.client import Client

    found = []
    async with Client(server) as client:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        for name, given in calls:
            answer = await client.call_tool(name, given)
            text = answer.content[0].text if answer.content else ""
            found.append(text if answer.is_error else answer.structured_content)
    return tools, found


NOTE = {"question": "what is akin to < fast > ?", "feedback": "I want a synonym"}
CALLS = [
    ("memory_add", NOTE),
    ("memory_search", {"question": NOTE["question"].upper()}),
    ("memory_update", {"entry_id": 1, "feedback": "an antonym"}),
    ("memory_delete", {"entry_id": 2}),
    ("memory_search", {"question": NOTE["question"]}),
    ("memory_erase", {"entry_id": 2}),
    ("memory_erase", {"entry_id": 2}),
]


@pytest.mark.slow
def test_an_agent_has_its_part_of_a_memory_over_stdio_reranks_and_decides(tmp_path, lm_dirs):
    pytest.importorskip("mcp", reason="needs the extra `mcp`")
    from mcp.client.stdio import StdioServerParameters

    words = ["-m", "pgra", "mcp", "--memory", str(tmp_path / "memory.sqlite"), "--user", "anna"]
    process = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
    tools, found = asyncio.run(talk(process, *CALLS))
    assert tools == [f"memory_{name}" for name in ("add", "search", "update", "delete", "erase")]
    added, near, updated, _, gone, erased, error = found
    assert added == {**added, "id": 1, **NOTE, "user": "anna"}
    assert near == {"result": [{**added, "score": 1.0}]}
    assert updated == {**updated, "id": 2, "feedback": "an antonym"}
    assert (gone, erased) == ({"result": []}, {"result": 3})
    assert "has no entry 2" in error
    asyncio.run(talk(process, CALLS[0]))
    asked = {"query": QUERY, "documents": ["a", "abc"], "top_n": 1}
    calls = [CALLS[1], ("rerank", asked), ("rerank", {**asked, "query": "refuse"})]
    calls.append(("decide", {"state": QUERY, "questions": {"topic": TOPIC}}))
    decider = Decider(pgra.CausalLM(str(lm_dirs["opt"]), device="cpu"))
    with pgra.Memory(tmp_path / "memory.sqlite", user="ben") as memory:
        server = serve.build_mcp(memory, Lengths(), "toy", decider)
        tools, (seen, ranked, refused, answers) = asyncio.run(talk(server, *calls))
    assert seen == {"result": []}  # of hers
    assert [one["index"] for one in ranked["results"]] == [1]
    assert "no room: use a smaller model" in refused
    assert {*answers["topic"]["probabilities"]} == {"art", "life"}
