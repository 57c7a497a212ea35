"""Arguments of in-context learning: which exemplars, how they are shown, how an answer is taken."""

import math
from dataclasses import dataclass, field

from pgra.config import argument as _arg
from pgra.config import at_least, choose
from pgra.errors import ConfigError
from pgra.prompts.fewshot import FORMATS

DECISIONS = ("generation", "score", "vote")


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
