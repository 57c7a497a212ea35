"""An OpenAI-compatible completions endpoint on loopback: real HTTP, and failures on demand."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Written(NamedTuple):
    """What a writer gives: text behind the prompt; tokens and chances of the prompt and of it."""

    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()


class Fault(NamedTuple):
    """How one request fails, after so many seconds; status 0 drops the connection."""

    status: int = 0
    body: str = ""
    headers: Mapping[str, str] = {}
    seconds: float = 0.0


def busy(wish: str | None = "0.05") -> Fault:
    headers = {} if wish is None else {"Retry-After": wish}
    return Fault(429, '{"error": {"message": "slow down", "code": "rate_limit"}}', headers)


def toy_writer(prompt: str, max_tokens: int, stop: str | None) -> Written:
    """Say the prompt's last word again; tokens are words, with the space before them."""
    words = [f" {word}" if i else word for i, word in enumerate(prompt.split(" "))]
    text = f" {prompt.split()[-1]}"
    written = text if stop else f"{text}\nand more"
    chances = (None, *(-len(word) / 4 for word in (*words[1:], text)))
    return Written(written, len(words), 1, (*words, text), chances)


class LoopbackEndpoint:
    """Answers by a writer.

    Attributes:
        writer: Writes.
        faults: How the next requests fail, first to last; then they succeed.
        seconds: Each answer takes.
        dies_after: Answers, after which every connection is dropped.
        bodies: What was asked, in order, the failed ones too.
        times: When.
        headers: Of the requests.
        most_at_once: Requests that were under way at a time.
        num_answered: Requests that were answered well.
    """

    def __init__(self, writer: Callable[[str, int, str | None], Written] = toy_writer) -> None:
        self.writer = writer
        self.faults: list[Fault] = []
        self.seconds = 0.0
        self.dies_after: int | None = None
        self.bodies: list[dict[str, object]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self.num_answered = self.at_once = 0
        self.lock, self.over = threading.Lock(), threading.Event()

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve until the block ends; gives the address for --base_url."""
        handler = type("Bound", (Handler,), {"owner": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            self.over.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def take(self, body: dict[str, object], headers: Mapping[str, str]) -> Fault:
        """Note a request, and answer it or say how it fails."""
        with self.lock:
            self.bodies.append(body)
            self.times.append(time.monotonic())
            self.headers.append({name.lower(): value for name, value in headers.items()})
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if self.dies_after is not None and self.num_answered >= self.dies_after:
                return Fault()
            if self.faults:
                return self.faults.pop(0)
            self.num_answered += 1
        return Fault(200, self.answer(body), {"Content-Type": "application/json"}, self.seconds)

    def answer(self, body: dict[str, object]) -> str:
        prompt, (stop,) = str(body["prompt"]), body.get("stop", [None])
        written = self.writer(prompt, body["max_tokens"], stop)
        logprobs = {"tokens": written.tokens, "token_logprobs": written.chances}
        shown = {"text": prompt + written.text, "logprobs": logprobs}
        choice = shown if body.get("echo") else {"text": written.text, "logprobs": None}
        usage = {
            "prompt_tokens": written.num_prompt_tokens,
            "completion_tokens": written.num_new_tokens,
        }
        told = {"id": "1", "object": "text_completion", "created": 0, "model": body["model"]}
        choices = [{"index": 0, "finish_reason": "stop", **choice}]
        return json.dumps({**told, "choices": choices, "usage": usage})


class Handler(BaseHTTPRequestHandler):
    owner: LoopbackEndpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.owner.take({"path": self.path, **body}, self.headers)
        self.owner.over.wait(fault.seconds)
        self.close_connection = not fault.status
        data = fault.body.encode()
        headers = {"Content-Type": "text/html", "Content-Length": str(len(data)), **fault.headers}
        try:
            if fault.status:
                self.send_response(fault.status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
        except OSError:  # the client is gone: it was killed, or had waited long enough
            self.close_connection = True
        finally:
            with self.owner.lock:
                self.owner.at_once -= 1

    def log_message(self, *_: object) -> None:
        """Say nothing."""
