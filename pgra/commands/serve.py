"""Servers for other tools: `pgra serve` over HTTP, `pgra mcp` for agents."""

import asyncio
import base64
import contextlib
import hmac
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl

import msgspec

from pgra import __version__
from pgra.commands.common import parse, quiet_libraries, say
from pgra.commands.memory import FamilyArguments, MemoryArguments, open_conversation
from pgra.config import Arguments, arg
from pgra.errors import ConfigError, DataError, ModelError, PgraError, device_fault
from pgra.lm import as_state_lm
from pgra.lm.base import CompleterArguments
from pgra.lm.names import find_entry, is_model
from pgra.memory.chat import page
from pgra.memory.lookup import LookupArguments
from pgra.memory.memory import Memory
from pgra.memory.stream import PromptedArguments
from pgra.rerank import PAIR_RERANKERS, find_reranker

if TYPE_CHECKING:
    from mcp.server import MCPServer
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from pgra.integrations.systemone import Decider
    from pgra.memory.chat import Page
    from pgra.rerank.reranker import Reranker
    from pgra.retrieval.dense import Index

_LOOPBACK = ("127.0.0.1", "localhost")
_TOKEN = "PGRA_TOKEN"
_MOST_BYTES = 16 << 20  # of a body
_MOST_SECONDS = 60  # until all of it is there
_MOST_FIELDS = 16  # of a form
_MOST_WAITING = 32  # requests
_SECONDS_TO_END = 5  # after SIGTERM
_VERSIONS = ("", "/v1", "/v2")  # that clients write before a route
_DECIDE = (
    "Answer questions about a state with probabilities. Each has instructions and a type: choice "
    "(criteria: what each option means), score (criteria: the levels, lowest first) or noul (yes "
    "or no)."
)

logger = logging.getLogger(__name__)

# The bodies are those of Cohere's clients; Jina's reranker has the same.

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_some = msgspec.Meta(min_length=1, max_length=2048)


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct):
    query: _Text
    documents: Annotated[list[str | Document], _some]
    top_n: _Count | None = None
    return_documents: bool | None = None


class SearchBody(msgspec.Struct):
    query: _Text
    k: _Count = 10


_State = str | dict[str, Any] | list[Any]


class DecideBody(msgspec.Struct):
    state: _State
    questions: Annotated[dict[str, dict[str, Any]], msgspec.Meta(min_length=1, max_length=64)]
    assets: Annotated[dict[str, Any], msgspec.Meta(max_length=0)] = {}


class FeedbackBody(msgspec.Struct):
    state: _State
    question: dict[str, Any]
    answer: str | int | bool


def rerank(reranker: "Reranker", name: str, body: RerankBody) -> Mapping[str, Any]:
    """Order documents; a relevance is the logistic function of the reranker's score."""
    from scipy.special import expit

    texts = [text if isinstance(text, str) else text.text for text in body.documents]
    results = []
    for hit in reranker.rank(body.query, texts, k=body.top_n):
        result: dict[str, Any] = {"index": hit.index, "relevance_score": float(expit(hit.score))}
        if body.return_documents:
            result["document"] = {"text": hit.text}
        results.append(result)
    return {"model": name, "results": results, "usage": {"total_tokens": 0}}  # some read it


def search(index: "Index", body: SearchBody) -> Mapping[str, Any]:
    return {"results": [vars(hit) for hit in index.search(body.query, k=body.k)]}


def decide(decider: "Decider", name: str, body: DecideBody) -> Mapping[str, Any]:
    answers = decider.answer(body.state, body.questions)
    return {"model": name, "answers": answers, "usage": {"input_tokens": 0, "output_tokens": 0}}


def learn(decider: "Decider", body: FeedbackBody) -> Mapping[str, Any]:
    decider.learn(body.state, body.question, body.answer)
    return {"answer": body.answer}


Endpoint = tuple[type, Callable[[Any], Mapping[str, Any]]]  # a body, and what answers it
Endpoints = Mapping[str, Endpoint]  # by name


async def read_body(request: "Request") -> bytes:
    """Return a request's body, which must be there in time and not too large."""
    from starlette.exceptions import HTTPException

    close = {"connection": "close"}  # the rest of it is not read
    body = bytearray()
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise HTTPException(413, f"a body has at most {_MOST_BYTES:,} bytes", close)
    except TimeoutError:
        raise HTTPException(408, f"send a body within {_MOST_SECONDS} seconds", close) from None
    return bytes(body)


class Turns:
    """Answers requests one after the other: models and a memory have one user at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def answer(self, request: "Request", work: Callable[[], "Response"]) -> "Response":
        """Do the work in a thread when it is its turn, unless the client leaves before."""
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        if self._num_waiting >= _MOST_WAITING:
            raise HTTPException(503, f"{_MOST_WAITING} requests are waiting: try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    raise ClientDisconnect
                return await run_in_threadpool(work)
        except (ValueError, RecursionError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if frame.f_globals["__name__"].startswith("pgra."):
                raise  # what our own code refuses is the request's fault
            raise ModelError(f"{type(error).__name__}: {error}") from error
        finally:
            self._num_waiting -= 1


def open_endpoint(endpoint: Endpoint, turns: Turns) -> Callable[..., Any]:
    """Return what answers the requests to an endpoint."""
    from starlette.responses import JSONResponse

    kind, answer = endpoint

    async def show(request: "Request") -> "Response":
        text = await read_body(request)
        body: Any = msgspec.json.decode(text, type=kind, strict=False)  # some send "true"
        return await turns.answer(request, lambda: JSONResponse(answer(body)))

    return show


def open_page(page: "Page", turns: Turns) -> Callable[..., Any]:
    """Return what answers the forms of a page; it refuses those of other pages."""
    from starlette.exceptions import HTTPException

    async def show(request: "Request") -> "Response":
        origin = request.headers.get("origin")  # as far as the browser reports it
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise HTTPException(403, "this form is of another page")
        body = await read_body(request)
        fields = parse_qsl(body.decode(), errors="strict", max_num_fields=_MOST_FIELDS)
        typed = {name: value.replace("\r\n", "\n") for name, value in fields}
        return await turns.answer(request, partial(page, typed))

    return show


async def refuse(request: "Request", error: Exception) -> "Response":
    """Report an error in one line."""
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    text = getattr(error, "detail", None) or device_fault(error) or str(error)
    status = getattr(error, "status_code", 500)
    if isinstance(error, ValueError | RecursionError | ConfigError | DataError):
        status = 422
    elif not isinstance(error, PgraError | HTTPException):
        text = f"{type(error).__name__}: {text}"
    message = " ".join(text.split())
    if status == 500:
        logger.error("%s: %s", request.url.path, message)
    answer: dict[str, Any] = {"message": message}
    if status == 422:  # as FastAPI's
        answer["detail"] = [{"loc": ["body"], "msg": message, "type": "value_error"}]
    return JSONResponse(answer, status, getattr(error, "headers", None))


def build_app(
    endpoints: Endpoints, hosts: Sequence[str], token: str = "", page: "Page | None" = None
) -> "Starlette":
    """Return the application: by name a body and what answers it, one after the other.

    The page is at /. Other host names than `hosts` are refused, against DNS rebinding. A token must
    come as a bearer token, or from a browser as the password.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def check(request: "Request", go_on: Any) -> Any:
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        if kind == "Basic":
            with contextlib.suppress(ValueError):
                secret = base64.b64decode(secret).decode().split(":", 1)[-1]
        if hmac.compare_digest(secret.encode(), token.encode()):
            return await go_on(request)
        message = {"message": f"send the server's {_TOKEN} as a bearer token"}
        return JSONResponse(message, 401, {"WWW-Authenticate": 'Basic realm="pgra"'})

    turns = Turns()
    routes = []
    if page is not None:
        routes.append(Route("/", open_page(page, turns), methods=["GET", "POST"]))
    for name, endpoint in endpoints.items():
        show = open_endpoint(endpoint, turns)
        routes += [Route(f"{version}/{name}", show, methods=["POST"]) for version in _VERSIONS]
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))]
    if token:
        guards.append(Middleware(BaseHTTPMiddleware, dispatch=check))
    kinds = (HTTPException, PgraError, ValueError, RecursionError, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(kinds, refuse)
    handlers[ClientDisconnect] = lambda *_: Response()  # nobody reads it
    return Starlette(routes=routes, middleware=guards, exception_handlers=handlers)


@dataclass(kw_only=True)
class RerankerArguments(Arguments):
    """How --lm orders documents, and what decides questions beside it."""

    reranker: str = arg(
        "likelihood",
        "How --lm orders documents: likelihood (of the query after each), prompted (its states), "
        "cross-encoder or causal (--lm is one).",
        choices=("prompted", *PAIR_RERANKERS),
    )
    task: str | None = arg(
        None, "Whose prompt prompted shows, without examples.", needs={"reranker": "prompted"}
    )

    classifier: list[str] = arg(
        [],
        "Saved classifiers, folders or OWNER/NAME: each decides the questions whose options are "
        "its labels, and whose instructions its template has.",
    )

    def open_reranker(self, lm: CompleterArguments, device: str) -> "Reranker | None":
        """Open an LM's reranker; None without an LM that reads here."""
        if not lm.lm or find_entry(lm.lm).states is None:
            return None
        from pgra.rerank.reranker import Reranker

        by = "states" if self.reranker == "prompted" else self.reranker
        return Reranker(
            lm.lm,
            task=self.task,
            template="{text}" if by == "states" and self.task is None else None,
            device=device,
            dtype=lm.lm_dtype,
            by=by,
        )

    def open_decider(self, lm: CompleterArguments, device: str) -> "Decider | None":
        """Open what decides; None without a classifier or a causal LM that reads here."""
        opened = None
        if lm.lm and is_model(lm.lm) and find_reranker(self.reranker).reads_lm:
            opened = as_state_lm(lm.lm, device=device, dtype=lm.lm_dtype)
        has_protocol = opened is not None and find_spec("transformers.decision") is not None
        if not (has_protocol or self.classifier):
            return None
        from pgra.integrations.systemone import Decider
        from pgra.methods.classifier import Classifier

        classifiers = {}
        for name in self.classifier:
            classifiers[name] = Classifier.load(name, lm=opened, device=device)
            opened = opened or classifiers[name].lm
        return Decider(opened, classifiers)


@dataclass(kw_only=True)
class ServeArguments(MemoryArguments, RerankerArguments):
    """What is served, and where."""

    index_dir: str | None = arg(None, "An index, for /v1/search: its folder, or OWNER/NAME.")
    memory: str = arg("", "A memory's file, made if it is missing; its page is at /.")
    host: str = arg("127.0.0.1", "Address that is listened at; by default for this machine alone.")
    port: int = arg(7860, "Its port.", least=1, below=65_536)


def main(argv: Sequence[str]) -> int:
    r"""Serve decisions, reranking, search and a memory's page over HTTP.

    Examples:
      pgra serve --lm bundled:smollm2-135m
      pgra serve --lm cross-encoder/ms-marco-MiniLM-L6-v2 --reranker cross-encoder
      pgra serve --index_dir artifacts/indexes/minilm-l6-0123456789ab
      pgra serve --classifier teams urgency
      pgra serve --memory memory.sqlite --encoder bundled:minilm-l6 --lm bundled:smollm2-135m

    POST /v1/systemone takes and gives what `transformers serve` does, /v1/rerank what Cohere's
    clients do, /v1/search takes query and k. At another --host than this machine's own, clients
    must send the text of the variable PGRA_TOKEN as a bearer token, or a browser as the password.
    """
    args, chat, lookup = parse(main, [ServeArguments, PromptedArguments, LookupArguments], argv)
    token = os.environ.get(_TOKEN, "")
    is_local = args.host in _LOOPBACK
    if not (chat.lm or args.index_dir or args.classifier or args.memory):
        raise ConfigError("nothing to serve: give --lm, --index_dir, --classifier or --memory")
    if not is_local and not token:
        raise ConfigError(f"--host {args.host} lets others in: set {_TOKEN} to what they must send")
    if not token.isascii():
        raise ConfigError(f"{_TOKEN} has letters beyond ASCII, which no header carries: use others")
    import uvicorn

    endpoints: dict[str, Endpoint] = {}
    device = chat.device
    memory_page = None
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(args.host, args.port))
        quiet_libraries()
        if reranker := args.open_reranker(chat, device):
            endpoints["rerank"] = RerankBody, partial(rerank, reranker, chat.lm)
        if args.index_dir:
            from pgra.retrieval.dense import Index

            index = Index.load(args.index_dir, device=device)
            endpoints["search"] = SearchBody, partial(search, index)
        if decider := args.open_decider(chat, device):
            endpoints["systemone"] = DecideBody, partial(decide, decider, chat.lm or "pgra")
            endpoints["feedback"] = FeedbackBody, partial(learn, decider)
        names = [f"/v1/{name}" for name in endpoints]
        if args.memory:
            names.append("/")
            memory_page = page(stack.enter_context(open_conversation(args, chat, lookup)))
        app = build_app(endpoints, _LOOPBACK if is_local else ["*"], token, memory_page)
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=_SECONDS_TO_END,
        )
        say(f"http://{args.host}:{args.port} serves {', '.join(names)}; Ctrl-C ends it")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # uvicorn ends in time, and raises it again
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Take an address, before models are loaded: requests wait until they are."""
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        )
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used: {error.strerror}; give another --port"
        ) from None


@dataclass(kw_only=True)
class AgentArguments(MemoryArguments, FamilyArguments, RerankerArguments):
    """Whose memory agents share, and what they rerank and decide by."""


def agents(argv: Sequence[str]) -> int:
    """Give agents a memory, a reranker and decisions: a server of the Model Context Protocol.

    Examples:
      pgra mcp --memory memory.sqlite --user anna --encoder bundled:minilm-l6
      pgra mcp --lm bundled:smollm2-135m

    Over stdio. Its tools are memory_add, memory_search, memory_update, memory_delete and
    memory_erase, on the entries of --user alone (and shared ones, which it finds); with --lm also
    rerank and decide.
    """
    args, lookup, lm = parse(
        agents, [AgentArguments, LookupArguments, CompleterArguments], argv, "pgra mcp"
    )
    quiet_libraries()
    with args.open_for(lookup, args.load_family(), args.device, create=True) as memory:
        reranker = args.open_reranker(lm, args.device)
        decider = args.open_decider(lm, args.device)
        build_mcp(memory, reranker, lm.lm, decider).run("stdio")
    return 0


def build_mcp(
    memory: Memory, reranker: "Reranker | None", lm: str, decider: "Decider | None"
) -> "MCPServer":
    """Return the server of the SDK."""
    from mcp.server import MCPServer

    def delete(entry_id: int) -> None:
        memory.delete(entry_id)

    def erase(entry_id: int) -> int:
        return memory.erase(entry_id)

    tools: dict[str, tuple[Callable[..., Any], str]] = {
        "memory_add": (memory.add, "Note what was meant by a question that was misunderstood."),
        "memory_search": (memory.search, "Find notes on questions like this one, nearest first."),
        "memory_update": (memory.update, "Replace a note's feedback; it gets another id."),
        "memory_delete": (delete, "Take a note out of the memory; its log keeps it."),
        "memory_erase": (erase, "Erase all notes on a note's question, for ever."),
    }
    if reranker is not None:

        def order(query: str, documents: list[str], top_n: int | None = None) -> dict[str, Any]:
            values = {"query": query, "documents": documents, "top_n": top_n}
            return dict(rerank(reranker, lm, msgspec.convert(values, RerankBody)))

        tools["rerank"] = (order, "Order documents by their relevance to a query, best first.")
    if decider is not None:
        tools["decide"] = (decider.answer, _DECIDE)
    server: Any = MCPServer("pgra", version=__version__)
    lock = threading.Lock()
    for name, (tool, text) in tools.items():
        server.add_tool(_for_agents(tool, lock), name, description=text)
    return server


def _for_agents(tool: Callable[..., Any], lock: threading.Lock) -> Callable[..., Any]:
    """Return a tool that is called once at a time, and whose errors an agent may read."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    def call(**arguments: Any) -> Any:
        try:
            with lock:
                return tool(**arguments)
        except (PgraError, ValueError) as error:
            raise ToolError(str(error)) from None

    return call
