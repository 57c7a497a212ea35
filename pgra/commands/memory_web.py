"""The conversation with a memory as a page in a browser: `pgra memory web`."""

import contextlib
import importlib.util
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import say
from pgra.commands.memory_arguments import ChatArguments, MemoryArguments
from pgra.commands.memory_chat import Opening
from pgra.config import argument as _arg
from pgra.config import parse_arguments
from pgra.errors import ConfigError
from pgra.lm.base import CompleterArguments
from pgra.memory.chat import Conversation
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import LookupArguments

EXAMPLE = """example:
  pgra memory web --lm bundled:smollm2-135m
"""
_LIBRARIES = ("jinja2", "starlette", "uvicorn")
_LOOPBACK = ("127.0.0.1", "localhost")
_MOST_PORT = 65_535
_PATIENCE = 10  # seconds that a question which is under way has after Ctrl-C


@dataclass(kw_only=True)
class WebArguments:
    """Where the page is."""

    host: str = _arg(
        "127.0.0.1", "Address that is listened at; the default is for this machine alone."
    )
    port: int = _arg(7860, "Its port; 0 takes any that is free.")

    def __post_init__(self) -> None:
        """Refuse what is no port."""
        if not 0 <= self.port <= _MOST_PORT:
            raise ConfigError(f"port is {self.port}: it is from 0 to {_MOST_PORT}")


def main(argv: Sequence[str] | None = None) -> int:
    """Show the page until Ctrl-C."""
    memory, chat, lookup, lm, web = parse_arguments(
        [MemoryArguments, ChatArguments, LookupArguments, CompleterArguments, WebArguments],
        argv,
        prog="pgra memory web",
        description="Ask an LM in a browser, see what it understood, correct it, and ask again.",
        epilog=EXAMPLE,
    )
    check_libraries()
    with listen(web) as listener:  # before the LM is loaded
        path = Path(memory.memory)
        opening = Opening.load(path, chat, lookup=lookup, lm=lm)
        serve(path, opening, web=web, listener=listener)
    return 0


def check_libraries() -> None:
    """Refuse to begin without what shows the page.

    Raises:
        ConfigError: If it is not installed.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the page needs {' and '.join(missing)}: pip install 'pgra[web]', or use pgra memory "
            "chat"
        )


def listen(web: WebArguments) -> socket.socket:
    """Take the port.

    Raises:
        ConfigError: If it cannot be had.
    """
    try:
        return socket.create_server((web.host, web.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {web.host}:{web.port} ({error.strerror}): give another --port (0 "
            "takes any that is free), or an address of this machine as --host"
        ) from None


def serve(path: Path, opening: Opening, *, web: WebArguments, listener: socket.socket) -> None:
    """Answer browsers until Ctrl-C; a question that is under way is answered first."""
    import uvicorn

    from pgra.memory.web import Desk, MemoryPage

    def start() -> Conversation:
        return opening.open(FeedbackLog.open(path))

    desk = Desk(start)
    about = f"{path}: {opening.describe()}"
    hosts = _LOOPBACK if web.host in _LOOPBACK else ("*",)
    config = uvicorn.Config(
        MemoryPage(desk, about).app(hosts),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=_PATIENCE,
    )
    say(about)
    say(f"open http://{web.host}:{listener.getsockname()[1]}/ in a browser; Ctrl-C ends it")
    if hosts == ("*",):
        say("note: whoever reaches this address can read and change the memory")
    with contextlib.closing(desk), contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
