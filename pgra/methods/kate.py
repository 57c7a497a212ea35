"""KATE whole (Liu et al. 2022, section 2.3): exemplars, prompt, a frozen LM's answer.

    exemplars = the pool's k nearest to the query        or drawn, for the baseline
    prompt    = exemplars, nearest first + query         as many as fit the LM's window
    label     = LM(prompt)                               a label word's chance, or what it writes

What is compared, found and answered is kept under the artefacts folder and made once, so a run that
was stopped goes on where it was.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pgra.artifacts import check_fingerprint, lock_folder, write_json, write_text
from pgra.config import DataArguments
from pgra.core import ALONE, Context, Example, Json, Prediction
from pgra.errors import ArtifactError, ConfigError
from pgra.exemplars import SelectionArguments
from pgra.exemplars.selection import Chosen, Selector, arrange
from pgra.lm.base import CompleterArguments, LanguageModel
from pgra.lm.cache import CachedLM
from pgra.memory.labels import PromptMemoryArguments
from pgra.methods.answers import Answered, Decider
from pgra.methods.kate_arguments import IclArguments
from pgra.methods.kate_inputs import Icl, IclRun, OpenLm, open_icl, open_lm, read_inputs
from pgra.methods.kate_results import Shown, vote_all, write_run
from pgra.prompts.fitting import Fit, fit_prompts
from pgra.reader.inputs import Query, read_queries
from pgra.report.results import METRICS_FILE, damaged, read_object
from pgra.run_folder import ARGUMENTS_FILE, IDENTITY_FILE, check_same_run, check_writable
from pgra.runs import Outcome, Summary, seed_folder, series_folder, sum_up

logger = logging.getLogger(__name__)

PROMPT_FILE = "prompt.txt"


def run_icl(
    run: IclRun,
    lm: OpenLm = open_lm,
    context: Context = ALONE,
) -> Outcome:
    """Let an LM decide a task's queries behind exemplars, or take up what is there.

    Args:
        run: Everything.
        lm: Opens the LM, where several runs share it.
        context: Who share the prompts out; the main one writes.

    Raises:
        ArtifactError: If the folder holds another run, or something kept is damaged.
        ConfigError: If arguments contradict each other, the data or the LM.
        DataError: If the data cannot be read, or a query does not fit the LM's window.
        ModelError: If a model cannot be used.
    """
    check_writable(run.folder)
    icl = open_icl(run, lm=lm, context=context)
    return _run_once(icl, run.selection.exemplar_seed, run.folder)


def run_icl_seeds(
    run: IclRun,
    seeds: Sequence[int],
    context: Context = ALONE,
) -> Summary:
    """Run with each of some exemplar seeds: the paper's five draws of its baseline.

    Args:
        run: What they share; the folder may hold `{seed}`.
        seeds: Different ones.
        context: As of `run_icl`.

    Raises:
        ArtifactError: As `run_icl`; also if the folder of several runs is a run itself.
        ConfigError: As `run_icl`; also if no seed decides anything.
    """
    if not run.selection.draws:
        raise ConfigError(
            f"seeds draw exemplars, and exemplars '{run.selection.exemplars}' in order "
            f"'{run.selection.order}' draws nothing: leave --seeds out"
        )
    pattern = str(run.folder)
    root = series_folder(pattern, seeds)
    check_writable(root)
    icl = open_icl(run, context=context)
    outcomes: dict[int, Outcome] = {}
    for seed in seeds:
        logger.info("seeds: seed %d (%d of %d)", seed, len(outcomes) + 1, len(seeds))
        outcomes[seed] = _run_once(icl, seed, seed_folder(pattern, seed))
    meaning = "exemplar seeds: draws of the exemplars, and their order"
    return sum_up(outcomes, root, meaning, context)


def _run_once(icl: Icl, seed: int, folder: Path) -> Outcome:
    selector = icl.selector(seed)
    identity = icl.identity(selector)
    check_writable(folder)
    is_main = icl.context.worker.is_main
    with lock_folder(folder) if is_main else nullcontext():
        check_same_run(folder, identity)
        is_finished = (folder / METRICS_FILE).is_file() and (folder / IDENTITY_FILE).is_file()
        icl.context.barrier()  # all have looked before the main process writes
        if is_finished:
            logger.info("run: %s is finished (reused)", folder)
            return Outcome(folder, read_object(folder / METRICS_FILE), reused=True)
        shown, answered = answer(icl, selector, seed, prompt_folder=folder if is_main else None)
        if is_main:
            write_json(folder / IDENTITY_FILE, identity)
            write_json(folder / ARGUMENTS_FILE, icl.run.sections())
            write_run(
                *(folder, icl.run, icl.inputs, shown, answered),
                seed=seed,
                seconds=icl.seconds,
                made=identity,
            )
        icl.context.barrier()
    return Outcome(folder, read_object(folder / METRICS_FILE), reused=False)


def answer(
    icl: Icl, selector: Selector, seed: int, *, prompt_folder: Path | None = None
) -> tuple[Shown, list[Answered]]:
    """Choose each query's exemplars, write the prompts and ask.

    Args:
        icl: All that is needed, with its queries.
        selector: Chooses exemplars.
        seed: Of a random order.
        prompt_folder: Where the first query's prompt is written, before the LM is asked.
    """
    with _timed(icl, "exemplars"):
        chosen = selector.choose(icl.queries)
    _tell_leaks(chosen)
    if icl.decider is None or icl.completer is None:
        return Shown.whole(chosen), vote_all(icl.inputs, chosen)
    with _timed(icl, "prompts"):
        shown = _fit(icl, icl.completer, icl.decider, chosen, seed)
        prompts = [
            icl.decider.prompts(_examples(icl, rows), icl.recalled.asked(place, query))
            for place, (rows, query) in enumerate(zip(shown.rows, icl.queries, strict=True))
        ]
    if prompt_folder is not None:
        prompt_folder.mkdir(parents=True, exist_ok=True)
        write_text(prompt_folder / PROMPT_FILE, prompts[0][0] + "\n")
    with _timed(icl, "answers"), _told_asked(icl.completer):
        answered = icl.decider.decide(icl.queries, prompts)
    return shown, answered


def _examples(icl: Icl, rows: Sequence[int]) -> list[Example]:
    return [icl.recalled.example(row) for row in rows]


def _fit(icl: Icl, completer: LanguageModel, decider: Decider, chosen: Chosen, seed: int) -> Shown:
    """Leave out what does not fit, and put the others into the order of the prompt."""
    selection, queries = icl.run.selection, icl.queries
    wanted = [
        icl.recalled.rows(place, chosen.of(place), selection.count) for place in range(len(queries))
    ]

    def shown(place: int, count: int) -> list[int]:
        rows = wanted[place][:count]
        return arrange(rows, selection.order, query=queries[place].text, seed=seed)

    def write(place: int, count: int) -> Sequence[str]:
        asked = icl.recalled.asked(place, queries[place])
        return decider.prompts(_examples(icl, shown(place, count)), asked)

    fit: Fit = fit_prompts(
        completer.count_tokens,
        write,
        [len(rows) for rows in wanted],
        names=[query.id for query in queries],
        window=completer.window,
        num_new_tokens=decider.num_new_tokens,
    )
    if fit.num_dropped.any():
        logger.warning(
            "%d of %d queries got fewer exemplars than the %d chosen, so that their prompts fit "
            "the LM's %d tokens (%d left out in all)",
            int((fit.num_dropped > 0).sum()),
            len(queries),
            selection.count,
            completer.window,
            int(fit.num_dropped.sum()),
        )
    rows = [shown(place, count) for place, count in enumerate(fit.counts.tolist())]
    return Shown(chosen, rows, fit, icl.recalled)


def _tell_leaks(chosen: Chosen) -> None:
    if chosen.num_dropped.any():
        logger.info(
            "leak guard: %d examples were left out, being nearly the text of one of %d queries",
            int(chosen.num_dropped.sum()),
            int((chosen.num_dropped > 0).sum()),
        )


@contextmanager
def _told_asked(completer: LanguageModel) -> Iterator[None]:
    """Say how many prompts were asked meanwhile; several runs may share an LM."""
    if not isinstance(completer, CachedLM):
        yield
        return
    asked, found = completer.num_asked, completer.num_found
    yield
    logger.info(
        "answers: the LM was asked %d prompts, %d were answered before (reused)",
        completer.num_asked - asked,
        completer.num_found - found,
    )


@contextmanager
def _timed(icl: Icl, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    icl.seconds[stage] = time.perf_counter() - start


# A finished run of `pgra icl` on new queries: its pool, its exemplars' choice and its LM.
#
# The data must be where it was, for the pool is nowhere else; that it is the run's, `run.json`
# tells.


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
    selector = icl.selector(seed)
    _check(folder, icl.identity(selector))
    shown, answered = answer(icl, selector, seed)
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
