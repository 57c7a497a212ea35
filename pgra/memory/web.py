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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from pgra.errors import DataError, PgraError
from pgra.memory.chat import Conversation, SavedCorrection, Turn, show_near, visible

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
_T = TypeVar("_T")
_Act = Callable[["Tab", Mapping[str, str]], Awaitable[None]]


@dataclass(frozen=True)
class ShownTurn:
    """A turn as a tab shows it.

    Attributes:
        number: Its place in the tab, from 1.
        turn: The turn.
        saved: The correction that it was asked again after.
    """

    number: int
    turn: Turn
    saved: SavedCorrection | None = None


@dataclass
class Tab:
    """What one tab has asked.

    Attributes:
        id: In its address.
        turns: The newest, the newest last.
    """

    id: str
    turns: list[ShownTurn] = field(default_factory=list)

    def add(self, turn: Turn, saved: SavedCorrection | None = None) -> None:
        """Show a turn."""
        number = self.turns[-1].number + 1 if self.turns else 1
        self.turns = [*self.turns, ShownTurn(number, turn, saved)][-_MOST_TURNS:]

    def question(self, number: str) -> str:
        """Return the question of a turn.

        Raises:
            DataError: If it is none of those that are shown.
        """
        for shown in self.turns:
            if str(shown.number) == number:
                return shown.turn.question
        raise DataError("that question is no longer on the page: ask it again")


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
        self._tabs: OrderedDict[str, Tab] = OrderedDict()
        pages = Environment(
            loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined
        )
        pages.filters |= {"visible": visible, "show_near": show_near}
        self._template = pages.get_template("memory.html")

    async def _do(self, what: Callable[[Conversation], _T]) -> _T:
        """Do something when all that came before is done."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, what, self.conversation)

    def close(self) -> None:
        """Finish what is under way, and let go of the memory."""
        self._thread.submit(self.conversation.log.close).result()
        self._thread.shutdown()

    def app(self, hosts: Sequence[str]) -> Starlette:
        """Return the application.

        Args:
            hosts: Names under which it may be asked for; another page's script that has its own
                name point to this machine is refused by it.
        """
        acts: dict[str, _Act] = {"ask": self._ask, "correct": self._correct, "forget": self._forget}
        routes = [
            Route("/", self._start),
            Route("/memory.css", self._asset("memory.css", "text/css")),
            Route("/memory.js", self._asset("memory.js", "text/javascript")),
            Route("/chat/{tab}", self._show),
            *(
                Route(f"/chat/{{tab}}/{name}", self._form(name, act), methods=["POST"])
                for name, act in acts.items()
            ),
            # A refused form's address is its own: who loads that again gets the conversation.
            *(Route(f"/chat/{{tab}}/{name}", self._back) for name in acts),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        )

    async def _start(self, _: Request) -> Response:
        tab = Tab(secrets.token_urlsafe(16))
        self._tabs[tab.id] = tab
        while len(self._tabs) > _MOST_TABS:
            self._tabs.popitem(last=False)
        return _go(f"/chat/{tab.id}")

    def _tab(self, request: Request) -> Tab | None:
        tab = self._tabs.get(request.path_params["tab"])
        if tab is not None:
            self._tabs.move_to_end(tab.id)
        return tab

    async def _show(self, request: Request) -> Response:
        tab = self._tab(request)
        return _go("/") if tab is None else await self._render(tab)

    async def _back(self, request: Request) -> Response:
        return _go(f"/chat/{request.path_params['tab']}")

    def _form(self, name: str, act: _Act) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not _is_of_this_page(request):
                return PlainTextResponse("this form is of another page", 403)
            typed = await _read_form(request)
            if isinstance(typed, Response):
                return typed
            tab = self._tab(request)
            if tab is None:  # the server was started again, or the tab was long unused
                return _go("/")
            try:
                await act(tab, typed)
            except PgraError as error:
                return await self._render(tab, error=str(error), typed={"form": name, **typed})
            return _go(f"/chat/{tab.id}#{'memory' if name == 'forget' else 'answer'}")

        return answer

    async def _ask(self, tab: Tab, typed: Mapping[str, str]) -> None:
        question = typed.get("question", "")
        tab.add(await self._do(lambda conversation: conversation.ask(question)))

    async def _correct(self, tab: Tab, typed: Mapping[str, str]) -> None:
        question = tab.question(typed.get("turn", ""))
        feedback = typed.get("feedback", "")
        saved = await self._do(lambda c: c.correct(question, feedback))
        tab.add(await self._do(lambda c: c.ask(question)), saved)

    async def _forget(self, tab: Tab, typed: Mapping[str, str]) -> None:  # noqa: ARG002
        entry = typed.get("entry", "")
        if not (entry.isascii() and entry.isdigit()):
            raise DataError(f"'{entry}' is no entry's number")
        await self._do(lambda conversation: conversation.forget(int(entry)))

    async def _render(
        self, tab: Tab, *, error: str = "", typed: Mapping[str, str] | None = None
    ) -> Response:
        entries = await self._do(lambda c: c.entries())
        text = self._template.render(
            about=self.about,
            conversation=self.conversation,
            tab=tab,
            entries=entries[: -_MOST_SHOWN - 1 : -1],
            num_entries=len(entries),
            error=error,
            typed=typed or {},
        )
        return HTMLResponse(text, 422 if error else 200, headers=_HEADERS)

    def _asset(self, name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
        text = (_PAGE / name).read_text(encoding="utf-8")

        async def answer(_: Request) -> Response:
            return Response(text, headers=_HEADERS, media_type=kind)

        return answer


def _go(address: str) -> Response:
    return RedirectResponse(address, 303)


def _is_of_this_page(request: Request) -> bool:
    """Return whether a form was sent by our own page, as far as the browser tells."""
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


async def _read_form(request: Request) -> dict[str, str] | Response:
    """Return a form's fields; a refusal where it is none of this page's."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            return PlainTextResponse("that is more than a question and a correction", 413)
    try:
        found = parse_qs(body.decode("ascii"), errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError:  # of the decoding too
        return PlainTextResponse("that is no form of this page", 400)
    return {name: values[-1].replace("\r\n", "\n") for name, values in found.items()}
