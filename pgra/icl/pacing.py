"""When the next call to an endpoint may start: a limit a minute, pauses it asks for, back-off."""

import email.utils
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from pgra.errors import ModelError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_DELAY = 0.5  # seconds, doubled at each further try
_LONGEST_DELAY = 60.0
_LONGEST_WISH = 600.0  # a longer pause than this is for the user to wait for


class Hiccup(Exception):
    """A call that failed in a way that may pass.

    Attributes:
        wish: Seconds that the endpoint asks to wait; None where it says nothing.
    """

    def __init__(self, message: str, wish: float | None = None) -> None:
        super().__init__(message)
        self.wish = wish


class Halted(Exception):
    """A call that was not made, because another one failed for good."""


class Pace:
    """Lets calls start one after the other, over all threads.

    A pause holds every thread: what the endpoint says to one call holds for the next one too.

    Attributes:
        num_retries: Calls that were made again.
    """

    def __init__(self, requests_per_minute: float | None = None) -> None:
        """Start at once, or evenly spread over each minute."""
        self._gap = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._lock = threading.Lock()
        self._next = 0.0
        self._held_until = 0.0
        self.num_retries = 0

    def wait(self, halt: threading.Event) -> None:
        """Wait for a turn.

        Raises:
            Halted: If `halt` is set before.
        """
        while not halt.is_set():
            with self._lock:
                now = time.monotonic()
                start = max(self._next, self._held_until)
                if start <= now:
                    self._next = now + self._gap
                    return
            halt.wait(start - now)
        raise Halted

    def hold(self, seconds: float) -> bool:
        """Let no call start for so many seconds, and say whether none held already."""
        with self._lock:
            self.num_retries += 1
            now = time.monotonic()
            was_free = self._held_until <= now
            self._held_until = max(self._held_until, now + seconds)
            return was_free

    def patiently(self, call: Callable[[], _T], *, halt: threading.Event, max_retries: int) -> _T:
        """Call in turn, and again after each hiccup, with growing pauses.

        Args:
            call: Raises `Hiccup` where trying again may help.
            halt: Set when no call shall start any more.
            max_retries: Tries after the first.

        Raises:
            Halted: If `halt` was set.
            ModelError: If the last try failed too, or the endpoint asks for too long a pause.
        """
        for tried in range(max_retries + 1):
            self.wait(halt)
            try:
                return call()
            except Hiccup as hiccup:
                self._pause(hiccup, tried, max_retries)
        raise AssertionError("the last try returns or raises")

    def _pause(self, hiccup: Hiccup, tried: int, max_retries: int) -> None:
        if tried == max_retries:
            raise ModelError(f"{hiccup} ({tried + 1} tries)") from None
        if hiccup.wish is not None and hiccup.wish > _LONGEST_WISH:
            raise ModelError(f"{hiccup}, and asks to wait {hiccup.wish:.0f} s") from None
        delay = back_off(tried) if hiccup.wish is None else hiccup.wish
        if self.hold(delay):  # one line for the many calls that meet the same hiccup
            logger.warning("%s: again in %.1f s (try %d)", hiccup, delay, tried + 2)


def back_off(tried: int) -> float:
    """Give the seconds to wait after so many failed tries more than one, spread by a quarter.

    The spread keeps several processes from coming back together; no result depends on it.
    """
    return min(_FIRST_DELAY * 2.0**tried, _LONGEST_DELAY) * random.uniform(0.75, 1.0)


def read_retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Read a Retry-After header (RFC 9110, section 10.2.3): seconds, or a date.

    Args:
        value: The header; None where there is none.
        now: Seconds since the epoch; None is the clock's.

    Returns:
        Seconds from now, at least 0; None where the header says nothing.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = date.timestamp() - (time.time() if now is None else now)
    return max(0.0, seconds) if math.isfinite(seconds) else None
