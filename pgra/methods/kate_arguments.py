"""Arguments of in-context learning: which exemplars, how they are shown, how an answer is taken."""

import math
from dataclasses import dataclass, field

from pgra.config import DTYPES, LEAK_JACCARD, POOLINGS, RetrieverArguments, at_least, choose
from pgra.config import argument as _arg
from pgra.errors import ConfigError
from pgra.exemplars.choice import METRICS, NEIGHBOR_SELECTORS, ORDERS, SELECTORS, Choice
from pgra.prompts.formats import FORMATS

BM25 = "bm25"
PROMPTED = "prompted"
_USUAL = 8
DECISIONS = ("generation", "score", "vote")


@dataclass(kw_only=True)
class SelectionArguments:
    """Which labelled examples stand before a query."""

    exemplars: str = _arg(
        "knn",
        "How they are chosen: knn (KATE: the query's nearest), knn-mmr (near, and unlike each "
        "other), random, balanced (the labels in turn), fixed (the first ones, or those of "
        "--exemplar_file).",
    )
    num_exemplars: int | None = _arg(
        None,
        "Labelled examples in each prompt; default: 8, and the paper's number where answers are "
        "written.",
    )
    farthest: bool = _arg(False, "With knn: the least alike, the control of the paper's Table 2.")
    redraw: bool = _arg(
        False, "With random and balanced: a draw for each query (the paper's baseline), not one."
    )
    exemplar_seed: int = _arg(0, "Seed of what is drawn, and of a random order.")
    exemplar_file: str | None = _arg(
        None, "With fixed: a file with an example a line: its row in the pool, from 0, or its id."
    )
    mmr_lambda: float = _arg(
        0.5, "With knn-mmr: weight of nearness against being unlike the others; 1 is knn."
    )
    mmr_candidates: int = _arg(100, "With knn-mmr: among how many nearest it chooses.")
    encoder: str = _arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "What compares texts: an encoder (hub id, folder or bundled:NAME), bm25, or prompted: the "
        "state of --lm under the task's prompt, h*(x) of PGRA (prompted:NAME for another LM).",
    )
    likeness: str = _arg("cosine", "Of vectors: cosine, dot, or euclidean (its negative).")
    pooling: str = _arg(
        "auto",
        "auto (the model's own, else mean), cls, last, max, mean, pooler or cls_before_pooler. "
        "Under another than its own a sentence-transformers model has no Dense and Normalize.",
    )
    max_encoder_tokens: int | None = _arg(
        None, "Tokens of a text that the encoder reads; default: the model's own, else 128."
    )
    query_prompt: str | None = _arg(
        None, "What the encoder reads before each text; default: the model's own, else nothing."
    )
    encoder_dtype: str = _arg(
        "auto", "auto (bfloat16 on a GPU, else float32), float32, bfloat16 or float16."
    )
    prompt_exemplars: int = _arg(8, "With --encoder prompted: exemplars of that prompt, balanced.")
    order: str = _arg(
        "nearest-first",
        "In the prompt: nearest-first (the paper's; the farthest first with --farthest), "
        "nearest-last (next to the query), or random.",
    )
    leak_jaccard: float = _arg(
        LEAK_JACCARD,
        "Share of common words from which on an example is nearly the query's own text, and never "
        "shown with it; nor is what differs in an article, 'please' or a misspelt word alone.",
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        choose("exemplars", self.exemplars, SELECTORS)
        choose("likeness", self.likeness, METRICS)
        choose("pooling", self.pooling, POOLINGS)
        choose("order", self.order, ORDERS)
        choose("encoder_dtype", self.encoder_dtype, DTYPES)
        at_least("num_exemplars", self.num_exemplars, 0)
        at_least("prompt_exemplars", self.prompt_exemplars, 0)
        at_least("exemplar_seed", self.exemplar_seed, 0)
        at_least("max_encoder_tokens", self.max_encoder_tokens, 4)
        if self.exemplar_file is not None and self.exemplars != "fixed":
            raise ConfigError(
                f"exemplar_file names fixed exemplars, and exemplars is '{self.exemplars}': add "
                "--exemplars fixed, or leave it out"
            )
        self.choice()

    @property
    def compares(self) -> bool:
        """Say whether queries are compared with the pool."""
        return self.exemplars in NEIGHBOR_SELECTORS and self.count > 0

    @property
    def count(self) -> int:
        """Give the number of exemplars, which the task says where nobody else does."""
        return _USUAL if self.num_exemplars is None else self.num_exemplars

    @property
    def draws(self) -> bool:
        """Say whether the seed decides anything."""
        return self.exemplars in ("balanced", "random") or self.order == "random"

    def choice(self, fixed: tuple[int, ...] = (), seed: int | None = None) -> Choice:
        """Give how exemplars are chosen.

        Args:
            fixed: Rows of the pool, with exemplars "fixed".
            seed: Instead of `exemplar_seed`.

        Raises:
            ConfigError: If they contradict each other.
        """
        return Choice(
            method=self.exemplars,
            count=self.count,
            farthest=self.farthest,
            redraw=self.redraw,
            seed=self.exemplar_seed if seed is None else seed,
            fixed=fixed,
            diversity=self.mmr_lambda,
            num_near=self.mmr_candidates,
        )

    def encoder_arguments(self) -> RetrieverArguments:
        """Give what `pgra.retrieval.dense.load_encoder` takes; lengths are left to the metric."""
        return RetrieverArguments(
            encoder=self.encoder,
            pooling=self.pooling,
            normalize=False,
            max_encoder_tokens=self.max_encoder_tokens,
            query_prompt=self.query_prompt,
            encoder_dtype=self.encoder_dtype,
        )


@dataclass(kw_only=True)
class IclArguments:
    """How prompts are written and answers taken, and where they go."""

    prompt_format: str | None = _arg(
        None,
        "task (the template of the task's YAML, with PGRA's instruction) or kate (the paper's: "
        "'Sentence: ... Label: Positive'); default: task, and kate where a task writes answers.",
    )
    decide_by: str | None = _arg(
        None,
        "score (the likeliest label word), generation (what the LM writes), or vote (no LM: the "
        "majority of the exemplars, of a tie the nearest); default: score, and generation where a "
        "task has no labels.",
    )
    calibrate: bool = _arg(
        False,
        "Divide a label's chance by the one that the same prompt gives it for an input without "
        "content (Zhao et al. 2021): three more prompts for each set of exemplars.",
    )
    length_normalize: bool = _arg(False, "Divide a label word's log-probability by its tokens.")
    max_new_tokens: int | None = _arg(
        None, "Most tokens that are written; default: the task's, 10 where labels are written."
    )
    query_dataset_name: str | None = _arg(
        None,
        "Take the test split of another data set for queries: hub id, local folder or "
        "bundled:NAME (the paper: SST-2 examples, IMDB queries); --test_file names a file.",
    )
    artifacts_dir: str = _arg("artifacts", "Folder of vectors, neighbors and answers.")
    output_dir: str = _arg(
        "runs/{task}-{system}",
        "The run's folder; {task} and {system} (icl-knn, icl-farthest) are filled in.",
    )
    device: str = _arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    seeds: list[str] | None = field(
        default=None,
        metadata={
            "help": "Run once with each of these exemplar seeds, such as 0 1 2 3 4: mean and "
            "spread go to summary.json."
        },
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if self.prompt_format is not None:
            choose("prompt_format", self.prompt_format, FORMATS)
        if self.decide_by is not None:
            choose("decide_by", self.decide_by, DECISIONS)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        if self.decide_by in ("generation", "vote"):
            for name in ("calibrate", "length_normalize"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} changes scores of label words, and --decide_by {self.decide_by} "
                        "has none: leave it out, or use --decide_by score"
                    )


def no_number(value: float) -> float | None:
    """Give a likeness as JSON tells it: None where nothing was compared."""
    return None if math.isnan(value) else round(float(value), 6)
