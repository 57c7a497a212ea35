"""Bars of work that takes more than two seconds; in a log file, a line every half minute.

The level ERROR of the logger `pgra`, which `-q` sets, hides them.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

_LINE = "{desc}: {n_fmt}/{total_fmt} in {elapsed}, {rate_fmt}{postfix}"


class Bar(tqdm):  # type: ignore[misc]  # not followed by mypy
    """A bar with a name and a rate on stderr."""

    seconds = 30.0  # before and between the lines of a log
    delay = 2.0  # seconds before a terminal shows it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what tqdm takes; `desc` is the name, `unit` what the rate counts."""
        self.is_log = not sys.stderr.isatty()
        is_quiet = logging.getLogger("pgra").getEffectiveLevel() >= logging.ERROR
        kwargs["disable"] = is_quiet or kwargs.get("disable", False)
        kwargs.setdefault("delay", type(self).delay)
        if self.is_log:
            kwargs.setdefault("bar_format", _LINE)
            kwargs |= {"mininterval": self.seconds, "delay": self.seconds, "leave": True}
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if not self.is_log:
            return bool(super().display(msg, pos))
        if msg != "":  # which would clear a line on a terminal
            self.fp.write(f"{self if msg is None else msg}\n")
            self.fp.flush()
        return False

    def tell(self, line: str) -> None:
        """Write a line above it."""
        if self.is_log and not self.disable:
            self.fp.write(f"{line}\n")
        elif not self.disable:
            self.write(line, file=self.fp)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' bars and warnings in the block; see `hide_transformers`."""
    from transformers.utils import logging as library

    level = library.get_verbosity()
    had_bars = library.is_progress_bar_enabled()
    hide_transformers()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if had_bars:
            library.enable_progress_bar()


def hide_transformers() -> None:
    """Hide transformers' bars and warnings, not downloads', unless `pgra` logs at DEBUG."""
    if logging.getLogger("pgra").isEnabledFor(logging.DEBUG):
        return
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as library

    shows_downloads = not are_progress_bars_disabled()
    library.set_verbosity_error()
    library.disable_progress_bar()  # which hides those of the hub too
    if shows_downloads:
        enable_progress_bars()
