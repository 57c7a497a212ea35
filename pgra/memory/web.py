"""The conversation with a memory as a page: `pgra memory web`.

One Jinja2 template of plain forms, escaped and without a script. The server keeps no state but the
memory, which all visitors share.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from pgra.data.read import whole_number
from pgra.errors import DataError, PgraError, visible
from pgra.memory.chat import Conversation, Turn

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
_MOST_BYTES = 256 * 1024  # of a form; the longest key, every letter of it escaped, is less
_MOST_SHOWN = 200  # entries on a page
_T = TypeVar("_T")
_Form = Mapping[str, str]


class MemoryPage:
    """The page, and what its forms do; the memory and the LM have one thread."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.about = f"{conversation.memory.path}: {conversation.about}"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="conversation")
        loader = FileSystemLoader(Path(__file__).parent / "assets")
        pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
        pages.filters["visible"] = visible
        self._template = pages.get_template("memory.html")

    def close(self) -> None:
        self._thread.shutdown()

    def app(self, hosts: Sequence[str]) -> Starlette:
        """Return the application; it refuses other host names, against DNS rebinding."""
        routes = [Route("/", self._show), Route("/", self._form, methods=["POST"])]
        named = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
        return Starlette(routes=routes, middleware=[named])

    async def _do(self, what: Callable[[Conversation], _T]) -> _T:
        """Run a function after all earlier ones."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, what, self.conversation)

    async def _show(self, _: Request) -> Response:
        return await self._render({})

    async def _form(self, request: Request) -> Response:
        _check_origin(request)
        typed = await _read_form(request)
        try:
            turn = await self._do(lambda conversation: _act(conversation, typed))
        except PgraError as error:
            return await self._render(typed, error=str(error))
        return await self._render(typed, turn)

    async def _render(self, typed: _Form, turn: Turn | None = None, error: str = "") -> Response:
        entries = await self._do(lambda conversation: list(conversation.memory))
        text = self._template.render(
            about=self.about,
            system=self.conversation.system,
            turn=turn,
            entries=entries[: -_MOST_SHOWN - 1 : -1],
            num_entries=len(entries),
            error=error,
            typed=typed,
        )
        return HTMLResponse(text, 422 if error else 200, headers=_HEADERS)


def _act(conversation: Conversation, typed: _Form) -> Turn | None:
    question, feedback = typed.get("question", ""), typed.get("feedback", "")
    entry, name = whole_number(typed.get("entry", "")), typed.get("do")
    if name == "ask":
        return conversation.ask(question)
    if name == "add":
        return conversation.ask(question, conversation.memory.add(question, feedback.strip()))
    if entry is None:
        raise DataError(f"'{typed.get('entry', '')}' is no entry's number")
    if name == "update":
        conversation.memory.update(entry, feedback.strip())
    elif name == "delete":
        conversation.memory.delete(entry)
    return None


def _check_origin(request: Request) -> None:
    """Refuse a form of another page, as far as the browser reports its origin."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise HTTPException(403, "this form is of another page")


async def _read_form(request: Request) -> dict[str, str]:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise HTTPException(413, "that is more than a question and a feedback")
        found = parse_qs(body.decode("ascii"), errors="strict", max_num_fields=8)
    except (ClientDisconnect, ValueError):  # of the decoding too
        raise HTTPException(400, "that is no form of this page") from None
    return {name: values[-1].replace("\r\n", "\n") for name, values in found.items()}
