"""A finished run of `pgra icl` on new queries: its pool, its exemplars' choice and its LM.

The data must be where it was, for the pool is nowhere else; that it is the run's, `run.json` tells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pgra.config import DataArguments
from pgra.errors import ArtifactError
from pgra.evaluation.results import METRICS_FILE
from pgra.evaluation.run_files import damaged, read_object
from pgra.icl.arguments import IclArguments, SelectionArguments
from pgra.icl.opening import CompleterArguments
from pgra.io import check_fingerprint
from pgra.memory.label_arguments import PromptMemoryArguments
from pgra.pipelines.icl import answer
from pgra.pipelines.icl_inputs import IclRun, read_inputs
from pgra.pipelines.icl_opening import open_icl
from pgra.pipelines.run_folder import ARGUMENTS_FILE, IDENTITY_FILE
from pgra.reader.queries import Query, read_queries
from pgra.types import Example, Json, Prediction

_SECTIONS: Mapping[str, type] = {
    "data": DataArguments,
    "completer": CompleterArguments,
    "selection": SelectionArguments,
    "icl": IclArguments,
}
# Of a run's identity, what is of its queries, and of a memory, which may be another one now.
_LEADING = ("task", "labels", "train")  # the others follow from these
_FREE = ("answers", "memory", "method", "test")


@dataclass(frozen=True)
class PromptedAnswer:
    """What an LM says of a query behind its exemplars.

    Attributes:
        query: The query.
        prediction: The label, or the text that was written.
        more: Its exemplars and corrections, as `predictions.jsonl` tells them.
        examples: The exemplars, in the prompt's order.
    """

    query: Example
    prediction: Prediction
    more: Mapping[str, Json]
    examples: Sequence[Example]


def is_icl_run(folder: Path) -> bool:
    """Say whether a folder is a finished run of `pgra icl`."""
    names = (METRICS_FILE, IDENTITY_FILE, ARGUMENTS_FILE)
    if not all((folder / name).is_file() for name in names):
        return False
    return "selection" in read_object(folder / ARGUMENTS_FILE)


def load_icl_run(folder: Path, *, artifacts_dir: str | None = None, device: str = "auto") -> IclRun:
    """Read the arguments of a finished run.

    Args:
        folder: The run.
        artifacts_dir: Folder of vectors and answers; None is the run's.
        device: What computes, whatever the run's was.

    Raises:
        ArtifactError: If its arguments are damaged, or of another version.
        ConfigError: If they contradict each other.
    """
    values = read_object(folder / ARGUMENTS_FILE)
    changes = {"device": device, "seeds": None}
    if artifacts_dir is not None:
        changes["artifacts_dir"] = artifacts_dir
    try:
        parts: dict[str, Any] = {
            name: _section(cls, values[name], {**values["runtime"], **changes})
            for name, cls in _SECTIONS.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise damaged(folder / ARGUMENTS_FILE, error) from None
    return IclRun(**parts)


def _section(cls: type, own: Mapping[str, Any], runtime: Mapping[str, Any]) -> object:
    names = {field.name for field in fields(cls)}
    return cls(**{**own, **{name: value for name, value in runtime.items() if name in names}})


def answer_queries(
    folder: Path, run: IclRun, queries: Sequence[Query], memory: PromptMemoryArguments
) -> list[PromptedAnswer]:
    """Decide new queries as a finished run decided its own, with or without a memory.

    Args:
        folder: The run.
        run: Its arguments.
        queries: Texts, or mappings of the task's inputs to texts.
        memory: A memory of corrections, if one is named there; the run's own is not used.

    Raises:
        ArtifactError: If pool, exemplars, prompt or LM are not the run's.
        PgraError: As `run_icl`.
    """
    run = replace(run, memory=memory)
    inputs = read_inputs(run)
    examples = read_queries(queries, task=inputs.task.name, inputs=inputs.task.inputs)
    icl = open_icl(run, replace(inputs, queries=examples, references=(), shared=0))
    seed = int(str(read_object(folder / IDENTITY_FILE).get("seed", 0)))
    choice = run.selection.choice(icl.fixed, seed)
    _check(folder, icl.identity(choice))
    shown, answered = answer(icl, choice, seed)
    return [
        PromptedAnswer(
            query,
            told.prediction,
            {**told.more, **shown.line(place, icl.inputs)},
            [icl.recalled.example(row) for row in shown.rows[place]],
        )
        for place, (query, told) in enumerate(zip(examples, answered, strict=True))
    ]


def _check(folder: Path, asked: Mapping[str, Json]) -> None:
    made = read_object(folder / IDENTITY_FILE)
    for names in (_LEADING, {*made, *asked} - {*_LEADING, *_FREE}):
        parts = [{k: v for k, v in one.items() if k in names} for one in (made, asked)]
        try:
            check_fingerprint(folder, made=parts[0], asked=parts[1])
        except ArtifactError as error:
            reason = str(error).removesuffix(": use another folder or build it again")
            reason = reason.replace("this run asks for", "what is there now is")
            raise ArtifactError(f"{reason}: restore it, or run pgra icl again") from None
