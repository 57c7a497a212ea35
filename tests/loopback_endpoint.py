"""An OpenAI-compatible completions endpoint on loopback: real HTTP, and failures on demand."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Body = Mapping[str, object]


@dataclass(frozen=True)
class Written:
    """What a writer gives: text behind the prompt; tokens and chances of the prompt and of it."""

    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()


Writer = Callable[[str, int, str | None], Written]


@dataclass(frozen=True)
class Fault:
    """How one request fails.

    Attributes:
        status: Of the response; 0 drops the connection.
        body: Of the response.
        headers: The same.
        seconds: To hang before.
    """

    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def busy(wish: str | None = "0.05") -> Fault:
    headers = {} if wish is None else {"Retry-After": wish}
    return Fault(429, b'{"error": {"message": "slow down", "code": "rate_limit"}}', headers)


def says(body: str, status: int = 200) -> Fault:
    return Fault(status, body.encode(), {"Content-Type": "text/html"})


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

    def __init__(self, writer: Writer = toy_writer) -> None:
        self.writer = writer
        self.faults: list[Fault] = []
        self.seconds = 0.0
        self.dies_after: int | None = None
        self.bodies: list[dict[str, object]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self.num_answered = self._at_once = 0
        self.lock = threading.Lock()
        self.over = threading.Event()

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve until the block ends; gives the address for --base_url."""

        class Bound(Handler):
            owner = self

        server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
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

    def take(self, body: dict[str, object], headers: Mapping[str, str]) -> Fault | None:
        """Note a request, and say how it fails."""
        with self.lock:
            self.bodies.append(body)
            self.times.append(time.monotonic())
            self.headers.append({name.lower(): value for name, value in headers.items()})
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            if self.dies_after is not None and self.num_answered >= self.dies_after:
                return Fault()
            if self.faults:
                return self.faults.pop(0)
            self.num_answered += 1
            return None

    def leave(self) -> None:
        with self.lock:
            self._at_once -= 1

    def answer(self, body: dict[str, object]) -> bytes:
        prompt, stop = str(body["prompt"]), body.get("stop")
        written = self.writer(prompt, int(str(body["max_tokens"])), stop[0] if stop else None)
        logprobs = {"tokens": written.tokens, "token_logprobs": written.chances}
        echo = bool(body.get("echo"))
        choice = {
            "index": 0,
            "text": (prompt if echo else "") + written.text,
            "finish_reason": "stop",
            "logprobs": logprobs if echo else None,
        }
        usage = {
            "prompt_tokens": written.num_prompt_tokens,
            "completion_tokens": written.num_new_tokens,
        }
        told = {"id": "1", "object": "text_completion", "created": 0, "model": body["model"]}
        return json.dumps({**told, "choices": [choice], "usage": usage}).encode()


class Handler(BaseHTTPRequestHandler):
    owner: LoopbackEndpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.owner.take({"path": self.path, **body}, self.headers)
        try:
            if fault is None:
                self.owner.over.wait(self.owner.seconds)
                self._send(200, self.owner.answer(body), {"Content-Type": "application/json"})
                return
            self.owner.over.wait(fault.seconds)
            if fault.status:
                self._send(fault.status, fault.body, fault.headers)
            else:
                self.close_connection = True
        finally:
            self.owner.leave()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client is gone: it was killed, or had waited long enough
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""
