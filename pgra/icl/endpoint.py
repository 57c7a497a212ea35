"""One call to an OpenAI-compatible completions endpoint, and what its failures mean for a user.

OpenAI's own client (`pip install 'pgra[openai]'`) speaks; tries, pauses and limits are
`pgra.icl.pacing`'s, which all threads share. The key comes from the environment alone. Only the
client has it, and it is struck out of all that an endpoint says.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from pgra.errors import ConfigError, ModelError
from pgra.icl.pacing import Hiccup, read_retry_after
from pgra.types import Json

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
_NO_KEY = "none"  # the client wants one; servers of one's own want none
_SHOWN = 200  # characters of what an endpoint said
_HERE = ("localhost", "127.0.0.1", "::1")
_MAY_PASS = (408, 409, 425, 429)  # and all from 500
_STRUCK = "***"
_KEY_LIKE = re.compile(r"\bsk-[\w*-]+")  # as endpoints quote keys, with their middle left out


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered.

    Attributes:
        text: What the LM wrote, behind the prompt where that was to be echoed.
        num_prompt_tokens: As the endpoint counts; None where it does not say.
        num_new_tokens: The same, of what it wrote.
        tokens: Text of each token, where chances were asked and given.
        chances: Log-probability of each; None for a first one.
    """

    text: str
    num_prompt_tokens: int | None
    num_new_tokens: int | None
    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """A model behind an endpoint.

    Attributes:
        model: As the endpoint calls it.
        base_url: Without a slash at its end.
        client: OpenAI's, which has the key.
    """

    model: str
    base_url: str
    client: Any = field(repr=False)

    @classmethod
    def open(cls, model: str, *, base_url: str | None = None, timeout: float = 60.0) -> Self:
        """Prepare to call, without calling.

        Args:
            model: As the endpoint calls it.
            base_url: Its address, up to `/v1`; None is OPENAI_BASE_URL, or OpenAI's own.
            timeout: Seconds without a byte after which a call has failed.

        Raises:
            ConfigError: If the client is not installed, the address is none, or it is OpenAI's and
                there is no key.
        """
        try:
            import openai
        except ImportError:
            raise ConfigError(
                f"--lm openai:{model} needs OpenAI's client: pip install 'pgra[openai]'"
            ) from None
        if not model:
            raise ConfigError("--lm openai: names no model: write --lm openai:MODEL")
        key = _read_key()
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        if base_url is not None:
            _check_address(base_url, with_key=key is not None)
        elif key is None:
            raise ConfigError(
                f"--lm openai:{model} needs a key in the environment (export {KEY}=...), or "
                "--base_url URL of an endpoint that needs none"
            )
        client = openai.OpenAI(
            api_key=key or _NO_KEY, base_url=base_url, timeout=timeout, max_retries=0
        )
        return cls(model, str(client.base_url).rstrip("/"), client)

    @property
    def name(self) -> str:
        """Give the words that messages begin with."""
        return f"openai:{self.model} at {self.base_url}"

    def call(self, body: Mapping[str, Json]) -> Reply:
        """Ask once.

        Args:
            body: The request: model, prompt and parameters.

        Raises:
            Hiccup: If it failed in a way that may pass: no connection, no answer in time, too many
                calls, or an error of the endpoint's own.
            ModelError: If it failed in another way, or what came is no completion.
        """
        import openai

        try:
            raw = self.client.completions.with_raw_response.create(**body)
        except openai.APITimeoutError:
            raise Hiccup(
                f"{self.name} did not answer in {self.client.timeout:g} s (--request_timeout)"
            ) from None
        except openai.APIConnectionError as error:
            reason = self.excerpt(str(error.__cause__ or error))
            raise Hiccup(f"{self.name} cannot be reached ({reason})") from None
        except openai.APIStatusError as error:
            raise self._word(error, body) from None
        except openai.OpenAIError as error:
            raise ModelError(f"{self.name}: {self.excerpt(str(error))}") from None
        return self._read(raw.text)

    def excerpt(self, text: str) -> str:
        """Shorten what an endpoint said to one line without the key."""
        key = self.client.api_key
        if key != _NO_KEY:
            text = text.replace(key, _STRUCK)
        text = " ".join(_KEY_LIKE.sub(_STRUCK, text).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

    def _word(self, error: Any, body: Mapping[str, Json]) -> Hiccup | ModelError:
        """Word a status that is no success.

        Args:
            error: openai.APIStatusError.
            body: What was asked.
        """
        status = error.status_code
        said = error.message if isinstance(error.body, Mapping) else f"{error.body or ''}"
        said = self.excerpt(said.removeprefix(f"Error code: {status}").removeprefix(" - "))
        told = f"{self.name} answered {status} '{said}'"
        if error.code == "insufficient_quota":
            return ModelError(f"{told}: the account has no money left; pay, and run again")
        if status in _MAY_PASS or status >= 500:
            return Hiccup(told, read_retry_after(error.response.headers.get("retry-after")))
        return ModelError(f"{told}: {_way_out(status, is_echo='echo' in body)}")

    def _read(self, text: str) -> Reply:
        """Read an answer; what is not needed of it may be missing.

        Raises:
            ModelError: If it is no completion.
        """
        try:
            told = json.loads(text)
            choice = told["choices"][0]
            written = choice["text"]
            if not isinstance(written, str):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError):
            raise ModelError(
                f"{self.name} answered '{self.excerpt(text)}', which is no completion: is "
                "--base_url that of an OpenAI-compatible endpoint (it usually ends in /v1)?"
            ) from None
        usage, chances = _mapping(told, "usage"), _mapping(choice, "logprobs")
        return Reply(
            written,
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            tuple(str(token) for token in _list(chances.get("tokens"))),
            tuple(_number(chance) for chance in _list(chances.get("token_logprobs"))),
        )


def _read_key() -> str | None:
    """Read the key; a header cannot hold every character, and the client would quote it.

    Raises:
        ConfigError: If it is no key.
    """
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{KEY} holds characters that no key has, such as a space: set it again")
    return key or None


def _check_address(base_url: str, *, with_key: bool) -> None:
    """Refuse what is no address, or has a secret in it, which files and messages would show.

    Raises:
        ConfigError: If it is not plain http(s)://HOST[:PORT][/PATH].
    """
    try:
        parts = urlsplit(base_url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise ConfigError("--base_url is no address: write http(s)://HOST[:PORT]/v1") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "--base_url holds a user name, a password or a query, which would be written down: "
            f"give the address alone, and the key in {KEY}"
        )
    if parts.scheme not in ("http", "https") or not has_host:
        raise ConfigError(f"--base_url '{base_url}' is no address: write http(s)://HOST[:PORT]/v1")
    if with_key and parts.scheme == "http" and parts.hostname not in _HERE:
        logger.warning("the key goes to %s over plain http, for all on the way to read", base_url)


def _way_out(status: int, *, is_echo: bool) -> str:
    if status in (401, 403):
        return f"see that {KEY} is set to a key that may use this model"
    if status == 404:
        return (
            "see --base_url (it usually ends in /v1) and the model's name; a model for chats alone "
            "has no completions"
        )
    if is_echo:
        return (
            "it does not score given words, or the prompt is too long for it (--lm_window): "
            "use --decide_by generation"
        )
    return "see that --lm_window is no larger than the model's"


def _mapping(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = told.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
