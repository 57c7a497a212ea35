"""How exemplars are chosen, in names and numbers: light, for the command line reads it."""

from collections.abc import Mapping
from dataclasses import dataclass

from pgra.config import choose
from pgra.core import Json
from pgra.errors import ConfigError

METRICS = ("cosine", "dot", "euclidean")
SELECTORS = ("balanced", "fixed", "knn", "knn-mmr", "random")
NEIGHBOR_SELECTORS = ("knn", "knn-mmr")
ORDERS = ("nearest-first", "nearest-last", "random")


@dataclass(frozen=True)
class Choice:
    """How exemplars are chosen.

    Attributes:
        method: One of `SELECTORS`.
        count: Exemplars a query, m.
        farthest: Whether `knn` takes the least alike: the control of KATE's Table 2.
        redraw: Whether `random` and `balanced` draw anew for each query.
        seed: Of what is drawn.
        fixed: Rows of the pool that all queries get, with "fixed".
        diversity: With "knn-mmr": lambda of maximal marginal relevance, 1 is `knn`.
        num_near: With "knn-mmr": among how many nearest it chooses.

    Raises:
        ConfigError: If they contradict each other.
    """

    method: str = "knn"
    count: int = 8
    farthest: bool = False
    redraw: bool = False
    seed: int = 0
    fixed: tuple[int, ...] = ()
    diversity: float = 0.5
    num_near: int = 100

    def __post_init__(self) -> None:
        choose("exemplars", self.method, SELECTORS)
        if self.farthest and self.method != "knn":
            raise ConfigError(
                f"farthest is for exemplars 'knn', and they are '{self.method}': leave it out"
            )
        if self.redraw and self.method not in ("balanced", "random"):
            raise ConfigError(
                f"redraw draws for each query, and exemplars '{self.method}' draws nothing: leave "
                "it out, or use --exemplars random"
            )
        if not 0 <= self.diversity <= 1:
            raise ConfigError(f"mmr_lambda is {self.diversity}: it must lie between 0 and 1")
        if self.method == "knn-mmr" and self.num_near < self.count:
            raise ConfigError(
                f"mmr_candidates is {self.num_near}, and {self.count} exemplars are chosen among "
                "them: raise it, or lower --num_exemplars"
            )

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what decides the choice, besides pool, queries and likeness."""
        named: dict[str, Json] = {"exemplars": self.method, "num_exemplars": self.count}
        if self.method == "knn":
            named["farthest"] = self.farthest
        if self.method == "knn-mmr":
            named |= {"mmr_lambda": self.diversity, "mmr_candidates": self.num_near}
        if self.method in ("balanced", "random"):
            named |= {"redraw": self.redraw, "exemplar_seed": self.seed}
        if self.method == "fixed":
            named["fixed"] = list(self.fixed)
        return named
