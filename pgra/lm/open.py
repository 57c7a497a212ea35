"""Opens the LM that answers prompts: here, by its name, or behind an endpoint (`openai:MODEL`).

Nothing heavy is imported until an LM is opened, and an endpoint needs no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.config import DEVICE_MAPS, DTYPES, QUANTIZATIONS, at_least, choose
from pgra.config import argument as _arg
from pgra.core import ALONE, Context
from pgra.errors import ConfigError
from pgra.lm.completion import Completer
from pgra.lm.remote import Prices, TokenCounter

REMOTE = "openai:"
_WINDOW = 2048  # tokens of an endpoint's LM that nobody told


@dataclass(kw_only=True)
class CompleterArguments:
    """Which LM answers, and how an endpoint is asked."""

    lm: str = _arg(
        "facebook/opt-13b",
        "Causal LM: hub id, folder or bundled:NAME; or openai:MODEL, behind an endpoint.",
    )
    lm_dtype: str = _arg(
        "auto", "auto (bfloat16 on a GPU, else float32), float32, bfloat16 or float16."
    )
    lm_quantization: str = _arg(
        "none",
        "Of an LM that is here: none, 8bit or 4bit weights; needs pip install 'pgra[int8]'.",
    )
    lm_device_map: str = _arg(
        "none", "none (one device), or over all GPUs of one process: auto, balanced, sequential."
    )
    lm_batch_tokens: int = _arg(
        2048, "Tokens in one LM batch on a CPU; a GPU takes 16 times as many."
    )
    lm_window: int | None = _arg(
        None,
        "Most tokens of a prompt and its answer; default: the LM's own, 2048 behind an endpoint.",
    )
    base_url: str | None = _arg(
        None,
        "An OpenAI-compatible endpoint, up to /v1 (default: OPENAI_BASE_URL, or OpenAI's). Its key "
        "is read from OPENAI_API_KEY alone, and written nowhere.",
    )
    tokenizer: str | None = _arg(
        None,
        "Hub id or folder whose tokenizer counts an endpoint's prompts; without it a token is "
        "taken for every 3 bytes.",
    )
    max_parallel_calls: int = _arg(8, "Calls to an endpoint that are under way at a time.")
    requests_per_minute: float | None = _arg(None, "Most calls a minute; default: no limit.")
    max_retries: int = _arg(
        6,
        "Times a call is made again after 429, 5xx, a time-out or a lost connection; pauses double "
        "from half a second, or are what the endpoint asks for.",
    )
    request_timeout: float = _arg(
        60.0, "Seconds without a byte from an endpoint after which a call has failed."
    )
    price_per_million_input: float | None = _arg(
        None, "Price of a million prompt tokens, to count the cost; with the next one."
    )
    price_per_million_output: float | None = _arg(None, "Price of a million tokens written.")

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        choose("lm_dtype", self.lm_dtype, DTYPES)
        choose("lm_quantization", self.lm_quantization, QUANTIZATIONS)
        choose("lm_device_map", self.lm_device_map, DEVICE_MAPS)
        at_least("lm_batch_tokens", self.lm_batch_tokens, 1)
        at_least("lm_window", self.lm_window, 1)
        at_least("max_parallel_calls", self.max_parallel_calls, 1)
        at_least("max_retries", self.max_retries, 0)
        for name in ("requests_per_minute", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}: it must be above 0")
        self._check_prices()
        for name in ("base_url", "tokenizer"):
            if getattr(self, name) is not None and not self.is_remote:
                raise ConfigError(
                    f"{name} is for an endpoint, and --lm {self.lm} is none: write --lm "
                    f"{REMOTE}MODEL, or leave --{name} out"
                )

    def _check_prices(self) -> None:
        names = ("price_per_million_input", "price_per_million_output")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(given) == 1:
            raise ConfigError(f"{' and '.join(names)} go together: give both")
        for name, price in given.items():
            if not 0 <= price < math.inf:
                raise ConfigError(f"{name} is {price}: it must be at least 0")

    @property
    def is_remote(self) -> bool:
        """Say whether the LM is behind an endpoint."""
        return self.lm.startswith(REMOTE)

    @property
    def prices(self) -> Prices | None:
        """Give the prices, where there are any."""
        if self.price_per_million_input is None or self.price_per_million_output is None:
            return None
        return Prices(self.price_per_million_input, self.price_per_million_output)


def open_completer(args: CompleterArguments, *, artifacts: Path, device: str = "auto") -> Completer:
    """Open an LM by its name.

    Args:
        args: Which, and how it is asked.
        artifacts: Where an endpoint's answers are kept, in `answers/`.
        device: Where an LM runs that is here.

    Raises:
        ConfigError: If an endpoint's address or key cannot be, or its client is not installed.
        ModelError: If an LM or tokenizer cannot be found or loaded.
    """
    return _open_remote(args, artifacts) if args.is_remote else _open_local(args, device)


def open_kept_completer(
    args: CompleterArguments,
    *,
    artifacts: Path,
    device: str = "auto",
    context: Context = ALONE,
) -> Completer:
    """Open an LM that is not asked twice what it has answered; see `open_completer`.

    Its answers are kept in `artifacts/answers`, those of an endpoint by its own completer.

    Args:
        args: Which, and how it is asked.
        artifacts: Where answers are kept.
        device: Where an LM runs that is here.
        context: Who share the prompts out, each with an LM of its own.

    Raises:
        ConfigError: As `open_completer`; also if several processes would ask an endpoint.
        ModelError: As `open_completer`.
    """
    if args.is_remote and context.worker.world > 1:
        raise ConfigError(
            f"--lm {args.lm} is behind an endpoint, which one process asks, and there are "
            f"{context.worker.world}: start it alone; --max_parallel_calls says how many calls "
            "are under way"
        )
    from pgra.lm.cache import AnswersCache, KeptCompleter

    completer = open_completer(args, artifacts=artifacts, device=device)
    if args.is_remote:
        return completer
    return KeptCompleter(completer, AnswersCache(artifacts / "answers"), context)


def _open_local(args: CompleterArguments, device: str) -> Completer:
    from pgra.lm.local import LocalCompleter

    completer = LocalCompleter.from_name(
        args.lm,
        dtype=args.lm_dtype,
        device=device,
        quantization=args.lm_quantization,
        device_map=args.lm_device_map,
        batch_tokens=args.lm_batch_tokens,
    )
    if args.lm_window is not None:
        if args.lm_window > completer.window:
            raise ConfigError(
                f"lm_window is {args.lm_window}, and '{args.lm}' reads {completer.window} tokens: "
                "give less, or leave it out"
            )
        completer.window = args.lm_window
    return completer


def _open_remote(args: CompleterArguments, artifacts: Path) -> Completer:
    from pgra.lm.cache import AnswersCache
    from pgra.lm.remote import Endpoint, RemoteCompleter

    endpoint = Endpoint.open(
        args.lm.removeprefix(REMOTE), base_url=args.base_url, timeout=args.request_timeout
    )
    return RemoteCompleter(
        endpoint,
        AnswersCache(artifacts / "answers"),
        window=args.lm_window or _WINDOW,
        counter=None if args.tokenizer is None else open_counter(args.tokenizer),
        max_parallel_calls=args.max_parallel_calls,
        max_retries=args.max_retries,
        requests_per_minute=args.requests_per_minute,
        prices=args.prices,
    )


def open_counter(name: str) -> TokenCounter:
    """Open a tokenizer to count with, special tokens included.

    Args:
        name: Hub id, folder or `bundled:NAME`; a folder needs no weights.

    Raises:
        ModelError: If there is none.
    """
    from pgra.lm.load import ModelSource, find_model, load_tokenizer, tokenizer_identity

    folder = Path(name).expanduser()
    source = ModelSource(name, str(folder), None, "") if folder.is_dir() else find_model(name)
    tokenizer = load_tokenizer(source)

    def count(texts: Sequence[str]) -> list[int]:
        return (
            [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids] if texts else []
        )

    return TokenCounter(tokenizer_identity(tokenizer), count)
