"""Which labelled examples go into a prompt: one `Selector` for KATE, PGRA's prompt and MemPrompt.

    pool = ExemplarPool(examples, args.leak_jaccard)
    similarity = open_similarity(args, examples, ...) if args.compares else None
    chosen = args.open(pool, similarity).choose(queries)      # rows of the pool, (B, m)
    rows = arrange(chosen.of(0), args.order, query=queries[0].text, seed=args.exemplar_seed)

`--exemplars module:Class` names a `Selector` (`pgra.exemplars.selection`) from outside, which only
writes `rank`. `pgra.exemplars.selector` writes PGRA's prompt. Light, for the command line.
"""

from dataclasses import dataclass
from typing import Any

from pgra.config import arg, find_class
from pgra.data.text import LEAK_JACCARD
from pgra.encoders import EncoderArguments

# Selectors whose one draw serves a whole task; all others choose for each query.
DRAWN_EXEMPLARS = ("balanced", "fixed", "official", "random")
SELECTORS = {
    "balanced": "pgra.exemplars.selection:Drawn",
    "fixed": "pgra.exemplars.selection:Selector",
    "knn": "pgra.exemplars.selection:Nearest",
    "random": "pgra.exemplars.selection:Drawn",
}
BM25 = "bm25"
VECTOR_METRICS = ("cosine", "dot", "euclidean")
ORDERS = ("nearest-first", "nearest-last", "random")
_USUAL = 8


@dataclass(kw_only=True)
class SelectionArguments(EncoderArguments):
    """Which labelled examples stand before a query."""

    GROUP = "Exemplars"

    exemplars: str = arg(
        "knn",
        "knn (KATE: the query's nearest), random, balanced (the labels in turn), fixed (the "
        "first), or module:Class.",
        choices=SELECTORS,
        is_open="selector",
        is_common=True,
    )
    num_exemplars: int | None = arg(
        None,
        "Examples in each prompt; default: 8, and the paper's number where answers are written.",
        least=0,
        is_common=True,
    )
    farthest: bool = arg(
        False,
        "With knn: the least alike, the control of the paper's Table 2.",
        needs={"exemplars": "knn"},
    )
    redraw: bool = arg(
        False,
        "With random and balanced: a draw for each query, the paper's baseline.",
        needs={"exemplars": ("random", "balanced")},
    )
    exemplar_seed: int | None = arg(
        None, "Seed of what is drawn, and of a random order; default: the run's --seed.", least=0
    )
    encoder: str = arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "What compares texts: an encoder (hub id, folder or bundled:NAME), or bm25.",
        is_common=True,
    )
    vector_metric: str = arg(
        "cosine", "Of vectors: cosine, dot, or euclidean (its negative).", choices=VECTOR_METRICS
    )
    order: str = arg(
        "nearest-first",
        "In the prompt: nearest-first (the paper's), nearest-last (next to the query), or random.",
        choices=ORDERS,
    )
    leak_jaccard: float = arg(
        LEAK_JACCARD,
        "Share of common words from which on an example is nearly the query, and is not shown.",
        above=0,
        most=1,
    )

    @property
    def selector(self) -> Any:
        """The class that chooses, a `pgra.exemplars.selection.Selector`."""
        return find_class("selector", self.exemplars, SELECTORS)

    def open(self, pool: Any, similarity: Any) -> Any:
        """Open it; a ConfigError if the pool does not have what is asked for."""
        return self.selector(self, pool, similarity)

    @property
    def compares(self) -> bool:
        """Whether queries are compared with the pool, so that a similarity must be opened."""
        return self.count > 0 and bool(self.selector.compares)

    @property
    def count(self) -> int:
        """The number of exemplars, which the task decides where the user does not."""
        return _USUAL if self.num_exemplars is None else self.num_exemplars

    @property
    def draws(self) -> bool:
        """Whether the seed decides anything."""
        return "exemplar_seed" in self.selector.uses or self.order == "random"
