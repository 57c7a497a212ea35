"""The conversation with a memory as a page: `pgra memory web`.

Plain forms: each answer is a page that was rendered here (Jinja2, which escapes all that users or
the LM wrote), so that keyboard, back button and screen readers work as on any page, and nothing is
asked of another host. A tab has its own conversation, by an address that cannot be guessed; the
memory is one for all, and for other processes.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pgra.errors import DataError, PgraError, visible
from pgra.memory.chat import Conversation, Turn

_PAGE = Path(__file__).parent / "assets"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MOST_BYTES = 256 * 1024  # of a form; the longest key, every letter of it escaped, is less
_MOST_FIELDS = 8
_MOST_TABS = 200  # the one that was used last longest ago gives way
_MOST_TURNS = 50  # of a tab
_MOST_SHOWN = 200  # entries on a page
_MOST_DIGITS = 19  # SQLite's numbers have less
_T = TypeVar("_T")
_Form = Mapping[str, str]
_Turns = dict[str, Turn]  # of a tab, by their numbers in it, the newest last


class _NamedHosts:
    """Serves those who ask for it by one of its names, and says to others what to do."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_named(Request(scope).headers.get("host", "")):
            await self._app(scope, receive, send)
            return
        port = f":{scope['server'][1]}" if scope.get("server") else ""
        names = " or ".join(f"http://{name}{port}/" for name in self._hosts)
        text = (
            f"This page is for this machine alone: open {names} there. To open it to others, start "
            "pgra memory web with --host 0.0.0.0\n"
        )
        await PlainTextResponse(text, 400)(scope, receive, send)

    def _is_named(self, host: str) -> bool:
        name = host if host in self._hosts else host.rpartition(":")[0]
        return "*" in self._hosts or name in self._hosts


class MemoryPage:
    """The page's addresses, and what they do.

    The conversation has a thread of its own: the log and the LM serve one question at a time.
    """

    def __init__(self, start: Callable[[], Conversation], about: str) -> None:
        """Open the conversation in its thread.

        Args:
            start: Opens it; what it raises is raised here.
            about: What stands before the conversation's own line of what is talked to.
        """
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="conversation")
        try:
            self.conversation = self._thread.submit(start).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self.about = f"{about}: {self.conversation.about}"
        self._tabs: OrderedDict[str, _Turns] = OrderedDict()
        loader = FileSystemLoader(_PAGE)
        pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
        pages.filters["visible"] = visible
        self._template = pages.get_template("memory.html")

    async def _do(self, what: Callable[[Conversation], _T]) -> _T:
        """Do something when all that came before is done."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, what, self.conversation)

    def close(self) -> None:
        """Finish what is under way, and let go of the memory."""
        self._thread.submit(self.conversation.system.log.close).result()
        self._thread.shutdown()

    def app(self, hosts: Sequence[str]) -> Starlette:
        """Return the application.

        Args:
            hosts: Names under which it may be asked for; another page's script that has its own
                name point to this machine is refused by it.
        """
        routes = [
            Route("/", self._start),
            Route("/memory.css", _asset),
            Route("/memory.js", _asset),
            Route("/chat/{tab}", self._show),
            Route("/chat/{tab}/{name}", self._form, methods=["POST"]),
            # A refused form's address is its own: who loads that again gets the conversation.
            Route("/chat/{tab}/{name}", self._back),
        ]
        return Starlette(routes=routes, middleware=[Middleware(_NamedHosts, hosts=hosts)])

    async def _start(self, _: Request) -> Response:
        tab = secrets.token_urlsafe(16)
        self._tabs[tab] = {}
        while len(self._tabs) > _MOST_TABS:
            self._tabs.popitem(last=False)
        return _go(f"/chat/{tab}")

    def _turns(self, request: Request) -> _Turns | None:
        """Return a tab's turns; None after the server was started again, or the tab long unused."""
        tab = request.path_params["tab"]
        if tab in self._tabs:
            self._tabs.move_to_end(tab)
        return self._tabs.get(tab)

    async def _show(self, request: Request) -> Response:
        turns = self._turns(request)
        return _go("/") if turns is None else await self._render(request, turns)

    async def _back(self, request: Request) -> Response:
        return _go(f"/chat/{request.path_params['tab']}")

    async def _form(self, request: Request) -> Response:
        origin = request.headers.get("origin")  # as far as the browser tells
        with suppress(ValueError):  # it is no address
            origin = origin and urlsplit(origin).netloc
        if origin is not None and origin != request.headers.get("host"):
            raise HTTPException(403, "this form is of another page")
        typed = await _read_form(request)
        turns, name = self._turns(request), request.path_params["name"]
        acts: Mapping[str, Callable[[_Turns, _Form], Awaitable[Turn | None]]] = {
            "ask": self._ask,
            "correct": self._correct,
            "change": self._change,
            "forget": self._forget,
            "restore": self._restore,
        }
        if turns is None or name not in acts:
            return _go("/")
        try:
            turn = await acts[name](turns, typed)
        except PgraError as error:
            return await self._render(request, turns, str(error), {"form": name, **typed})
        if turn is not None:
            number = int(next(reversed(turns), "0")) + 1
            turns[str(number)] = turn
            turns.pop(str(number - _MOST_TURNS), None)
        here = f"/chat/{request.path_params['tab']}"
        if turn is not None:
            return _go(f"{here}#answer")
        kept = {"search": typed.get("search", "")}
        if name == "forget":
            kept["forgotten"] = typed["entry"]
        told = urlencode({key: value for key, value in kept.items() if value})
        return _go(f"{here}{'?' if told else ''}{told}#memory")

    async def _ask(self, _: _Turns, typed: _Form) -> Turn:
        return await self._do(lambda c: c.ask(typed.get("question", "")))

    async def _correct(self, turns: _Turns, typed: _Form) -> Turn:
        turn, feedback = turns.get(typed.get("turn", "")), typed.get("feedback", "")
        if turn is None:
            raise DataError("that question is no longer on the page: ask it again")
        question = turn.question
        return await self._do(lambda c: c.ask(question, c.correct(question, feedback)))

    async def _change(self, _: _Turns, typed: _Form) -> None:
        entry, feedback = _entry_of(typed), typed.get("feedback", "")
        await self._do(lambda c: c.change(entry, feedback))

    async def _forget(self, _: _Turns, typed: _Form) -> None:
        entry = _entry_of(typed)
        await self._do(lambda c: c.forget(entry))

    async def _restore(self, _: _Turns, typed: _Form) -> None:
        entry = _entry_of(typed)
        await self._do(lambda c: c.restore(entry))

    async def _render(
        self, request: Request, turns: _Turns, error: str = "", typed: _Form | None = None
    ) -> Response:
        search = (typed or request.query_params).get("search", "").strip()
        forgotten = "" if error else request.query_params.get("forgotten", "")
        entries = await self._do(lambda c: c.entries(search))
        text = self._template.render(
            about=self.about,
            system=self.conversation.system,
            here=f"/chat/{request.path_params['tab']}",
            turns=list(turns.items()),
            entries=entries[: -_MOST_SHOWN - 1 : -1],
            num_entries=len(entries),
            search=search,
            forgotten=forgotten if _is_number(forgotten) else "",
            error=error,
            typed=typed or {},
        )
        return HTMLResponse(text, 422 if error else 200, headers=_HEADERS)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS


def _entry_of(typed: _Form) -> int:
    """Return the entry that a form is of."""
    entry = typed.get("entry", "")
    if not _is_number(entry):
        raise DataError(f"'{entry}' is no entry's number")
    return int(entry)


async def _asset(request: Request) -> Response:
    return FileResponse(_PAGE / request.url.path.removeprefix("/"), headers=_HEADERS)


def _go(address: str) -> Response:
    return RedirectResponse(address, 303)


async def _read_form(request: Request) -> dict[str, str]:
    """Return a form's fields.

    Raises:
        HTTPException: If it is none of this page's.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise HTTPException(413, "that is more than a question and a correction")
    try:
        found = parse_qs(body.decode("ascii"), errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError:  # of the decoding too
        raise HTTPException(400, "that is no form of this page") from None
    return {name: values[-1].replace("\r\n", "\n") for name, values in found.items()}
