"""HTTP to a server or an endpoint of LMs, by OpenAI's own client (the extra `openai`).

It retries, times out and pools connections. The key comes from the environment alone; only the
client has it, and it is removed from all that a server returns.
"""

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from pgra.errors import ConfigError, ModelError, cut
from pgra.lm.names import REMOTE
from pgra.types import Fields

KEY = "OPENAI_API_KEY"
_DECLINED = (400, 403, 404, 405, 415, 422, 501)  # what is asked is not offered here
_MOST_RETRIES = 6  # after 429, 5xx, a time-out or a lost connection
_NO_KEY = "none"  # the client wants one; servers of one's own want none
_SHOWN_CHARS = 120  # of what a server answered
_KEY_LIKE = re.compile(r"\bsk-[\w*-]+")  # as endpoints quote keys, with their middle left out
# A secret in the address would be written down and shown.
_ADDRESS = re.compile(r"https?://(\[[\da-f:]+\]|[^/:\s@?#]+)(:[1-9]\d*)?(/[^\s@?#]*)?")


T = TypeVar("T")
R = TypeVar("R")


def call_all(
    ask: Callable[[T], R], items: Sequence[T], *, parallel: int, done: Callable[[R], object]
) -> list[R]:
    """Make calls in parallel; return their results, in order. After a failure no other one starts.

    `done` is called with each result, as they come.
    """
    with ThreadPoolExecutor(parallel, "pgra-call") as pool:
        futures = [pool.submit(ask, item) for item in items]
        try:
            for future in as_completed(futures):
                done(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


class Refused(ModelError):
    """A server answered with an error, which has a `code` and names a parameter, or None."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Declined(Refused):
    """An endpoint does not support what it was asked."""


class Client:
    """Asks one address.

    Attributes:
        name: The LM, for messages.
        advice: What to look at where something fails.
        openai: OpenAI's client.
    """

    def __init__(
        self, lm: str, base_url: str | None, timeout: float, advice: str = "see --lm"
    ) -> None:
        """Open a client of an address; None is OPENAI_BASE_URL, or OpenAI's.

        Raises:
            ConfigError: If OpenAI's client is not installed, the address is invalid, or a key is
                missing.
        """
        import openai

        self.name = lm
        self.advice = advice
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        key = _read_key(lm, base_url)
        http = openai.DefaultHttpxClient(
            follow_redirects=False,  # prompts go to the address that was given alone
            event_hooks={"response": [_mark_error]},
        )
        self.openai = openai.OpenAI(
            api_key=key,
            base_url=base_url,
            timeout=timeout,
            max_retries=_MOST_RETRIES,
            http_client=http,
        )
        weakref.finalize(self.openai, http.close)

    def ask(self, path: str, body: Fields | None = None) -> Any:
        """Return the reply to GET, or to POST with a body.

        Raises:
            Declined: If that is not offered.
            Refused: If the server answers with another error.
            ModelError: If there is no reply.
        """
        import openai

        try:
            if body is None:
                return self.openai.get(path, cast_to=object)
            return self.openai.post(path, cast_to=object, body=body)
        except openai.APIStatusError as error:
            status = error.status_code
            kind = Declined if status in _DECLINED else Refused
            advice = "try again later" if status == 429 or status >= 500 else self.advice
            message = f"{self.name} answered {status} to {path} '{self.excerpt(error.body)}'"
            raise kind(f"{message}: {advice}", error.code, error.param) from None
        except (openai.OpenAIError, ValueError) as error:
            reason = self.excerpt(error.__cause__ or error)
            raise ModelError(
                f"{self.name} cannot be reached, or did not answer {path} whole ({reason}): "
                f"{self.advice}. What was read is kept: the same command continues"
            ) from None

    def first_model(self, path: str) -> dict[str, Any]:
        """Return what a server says of its first LM."""
        listed = self.ask(path)
        with self.reading("the LM it serves"):
            return {"id": str(listed["data"][0]["id"]), **listed["data"][0]}

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turn the errors of a reply that is not as it should be into a ModelError."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = self.excerpt(f"{type(error).__name__}: {error}")
            raise ModelError(
                f"{self.name} did not answer with {what} ({reason}): {self.advice}"
            ) from None

    def excerpt(self, text: object) -> str:
        """Shorten what a server answered to one line without the key."""
        text = str(text)
        if (key := self.openai.api_key) != _NO_KEY:
            text = text.replace(key, "***")
        return cut(" ".join(_KEY_LIKE.sub("***", text).split()), _SHOWN_CHARS)


def _read_key(lm: str, base_url: str | None) -> str:
    """Return the key to send; a ConfigError if it, or the address, is invalid."""
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= char <= "~" for char in key):  # the client would quote what no header holds
        raise ConfigError(f"{KEY} holds characters that no key has, such as a space: set it again")
    if base_url is not None and not _ADDRESS.fullmatch(base_url):
        raise ConfigError(
            f"{'--base_url' if lm.startswith(REMOTE) else '--lm'} must be http(s)://HOST[:PORT]/v1"
            f", without a user name, password or query: give the key in {KEY}"
        )
    if not key and base_url is None:
        raise ConfigError(
            f"--lm {lm} needs a key in the environment (export {KEY}=...), or --base_url URL of an "
            "endpoint that needs none"
        )
    return key or _NO_KEY


def _mark_error(response: Any) -> None:
    """Give an error under status 200 the status of its code, so that the client retries it."""
    if response.status_code == 501:  # not implemented, nor will it be
        response.headers["x-should-retry"] = "false"
    response.read()
    try:
        reply = response.json()
    except RecursionError:  # too deep: let the client read it as text, as a page that is not JSON
        response.headers["content-type"] = "text/plain"
        return
    except ValueError:
        return
    with contextlib.suppress(AttributeError, TypeError):  # of what is not an object
        first: Any = next(iter(reply.get("choices") or ()), {})  # where some providers put it
        error = reply.get("error") or first.get("error")
        if error and response.is_success:
            code = str(error.get("code"))
            response.status_code = int(code) if re.fullmatch("[45][0-9]{2}", code) else 503
