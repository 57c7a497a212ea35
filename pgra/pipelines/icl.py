"""KATE whole (Liu et al. 2022, section 2.3): a query's exemplars, its prompt, a frozen LM's answer.

    exemplars = the pool's k nearest to the query        or drawn, for the baseline
    prompt    = exemplars, nearest first + query         as many as fit the LM's window
    label     = LM(prompt)                               a label word's chance, or what it writes

What is compared, found and answered is kept under the artefacts folder and made once, so a run that
was stopped goes on where it was.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pgra.data.generation import GenerationTask
from pgra.errors import ConfigError
from pgra.evaluation.results import METRICS_FILE
from pgra.evaluation.run_files import read_object
from pgra.icl.answers_cache import AnswersCache
from pgra.icl.budget import Fit, fit_prompts
from pgra.icl.completion import Completer
from pgra.icl.deciding import Decider, WordScorer, WordWriter
from pgra.icl.formats import task_format
from pgra.icl.kept import KeptCompleter
from pgra.icl.likeness import Likeness
from pgra.icl.opening import open_completer
from pgra.icl.selection import Choice, Chosen, ExemplarPool, arrange
from pgra.io import write_json, write_text
from pgra.pipelines.icl_inputs import IclInputs, IclRun, open_likeness, read_fixed, read_inputs
from pgra.pipelines.icl_results import Shown, vote_all, write_run
from pgra.pipelines.run import Outcome
from pgra.pipelines.run_folder import ARGUMENTS_FILE, IDENTITY_FILE, check_same_run, check_writable
from pgra.pipelines.seeds import Summary, seed_folder, series_folder, sum_up
from pgra.types import Example, Json

logger = logging.getLogger(__name__)

PROMPT_FILE = "prompt.txt"
_WRITTEN_TOKENS = 10  # KATE's max_tokens


@dataclass(frozen=True)
class Icl:
    """One task's pool, queries, comparison and LM, opened once for all seeds.

    Attributes:
        run: The arguments.
        inputs: Pool and queries.
        pool: The pool, to choose from.
        likeness: What compares; None where exemplars are drawn or fixed.
        completer: The LM; None with `--decide_by vote`.
        decider: What asks it; None likewise.
        fixed: Rows of the pool that a file names.
        seconds: Wall-clock time by stage.
    """

    run: IclRun
    inputs: IclInputs
    pool: ExemplarPool
    likeness: Likeness | None
    completer: Completer | None = None
    decider: Decider | None = None
    fixed: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def queries(self) -> Sequence[Example]:
        """Give the queries."""
        return self.inputs.queries

    def identity(self, choice: Choice) -> dict[str, Json]:
        """Give all that decides a run's predictions."""
        asked = self.run.selection
        named: dict[str, Json] = {
            "method": self.run.system,
            "task": self.inputs.task.name,
            "labels": list(self.inputs.labels),
            "metric": self.inputs.metric,
            **choice.fingerprint,
            "order": asked.order,
            "leak_jaccard": asked.leak_jaccard,
            "seed": choice.seed,
            **self.inputs.fingerprint,
        }
        if self.likeness is not None:
            named["likeness"] = dict(self.likeness.fingerprint)
        if self.decider is not None and self.completer is not None:
            named["prompt"] = dict(self.decider.fingerprint)
            named["lm"] = dict(self.completer.fingerprint)
            named["window"] = self.completer.window
        return named


def run_icl(run: IclRun) -> Outcome:
    """Let an LM decide a task's queries behind exemplars, or take up what is there.

    Args:
        run: Everything.

    Raises:
        ArtifactError: If the folder holds another run, or something kept is damaged.
        ConfigError: If arguments contradict each other, the data or the LM.
        DataError: If the data cannot be read, or a query does not fit the LM's window.
        ModelError: If a model cannot be used.
    """
    check_writable(run.folder)
    return _run_once(open_icl(run), run.selection.exemplar_seed, run.folder)


def run_icl_seeds(run: IclRun, seeds: Sequence[int]) -> Summary:
    """Run with each of some exemplar seeds: the paper's five draws of its baseline.

    Args:
        run: What they share; the folder may hold `{seed}`.
        seeds: Different ones.

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
    icl = open_icl(run)
    outcomes: dict[int, Outcome] = {}
    for seed in seeds:
        logger.info("seeds: seed %d (%d of %d)", seed, len(outcomes) + 1, len(seeds))
        outcomes[seed] = _run_once(icl, seed, seed_folder(pattern, seed))
    return sum_up(outcomes, root, "exemplar seeds: draws of the exemplars, and their order")


def open_icl(run: IclRun) -> Icl:
    """Read the data and open all models; their weights are loaded when they are first needed.

    Raises:
        PgraError: As `run_icl`.
    """
    inputs = read_inputs(run)
    run = _settle(run, inputs)
    root = run.artifacts / "neighbors" / inputs.task.name
    pool = ExemplarPool(inputs.pool, jaccard=run.selection.leak_jaccard, root=root)
    pool.check(run.selection.count)
    icl = Icl(run, inputs, pool, open_likeness(run, inputs))
    if run.selection.exemplar_file is not None:
        path = Path(run.selection.exemplar_file).expanduser()
        icl = replace(icl, fixed=read_fixed(path, inputs, run.selection.count))
    if run.icl.decide_by == "vote":
        return icl
    completer = open_completer(run.completer, artifacts=run.artifacts, device=run.icl.device)
    if not run.completer.is_remote:  # what is paid for keeps its answers itself
        completer = KeptCompleter(completer, AnswersCache(run.artifacts / "answers"))
    return replace(icl, completer=completer, decider=_open_decider(run, inputs, completer))


def _settle(run: IclRun, inputs: IclInputs) -> IclRun:
    """Fill in what the task decides where the user does not, and refuse what it does not have."""
    task, count = inputs.task, run.selection.num_exemplars
    if isinstance(task, GenerationTask):
        _refuse_labels(run, task.name)
        count = task.num_exemplars if count is None else count
        decide_by, format_ = run.icl.decide_by or "generation", "kate"
    else:
        decide_by, format_ = run.icl.decide_by or "score", run.icl.prompt_format or "task"
    selection = replace(run.selection, num_exemplars=run.selection.count if count is None else count)
    if decide_by == "vote" and not selection.compares:
        raise ConfigError(
            f"decide_by 'vote' is the neighbors' vote, and exemplars '{selection.exemplars}' "
            f"with --num_exemplars {selection.count} are none: use --exemplars knn"
        )
    args = replace(run.icl, decide_by=decide_by, prompt_format=format_)
    return replace(run, selection=selection, icl=args)


def _refuse_labels(run: IclRun, task: str) -> None:
    for name, asked, own in (
        ("decide_by", run.icl.decide_by, "score"),
        ("exemplars", run.selection.exemplars, "balanced"),
        ("prompt_format", run.icl.prompt_format, "task"),
        ("calibrate", run.icl.calibrate, True),
        ("length_normalize", run.icl.length_normalize, True),
    ):
        if asked == own:
            raise ConfigError(
                f"{name} {own} is for tasks with labels, and answers of '{task}' are written: "
                "leave it out"
            )


def _open_decider(run: IclRun, inputs: IclInputs, completer: Completer) -> Decider:
    args, task = run.icl, inputs.task
    if isinstance(task, GenerationTask):
        return TextWriter(
            completer,
            LineFormat(task.frame, {}),
            max_new_tokens=args.max_new_tokens or task.max_new_tokens,
            stop=task.stop,
            progress=True,
        )
    how = task_format(task, args.prompt_format or "task")
    if args.decide_by == "generation":
        most = args.max_new_tokens or _WRITTEN_TOKENS
        return WordWriter(completer, how, how.words, max_new_tokens=most, progress=True)
    if args.max_new_tokens is not None:
        raise ConfigError(
            f"max_new_tokens is {args.max_new_tokens}, and label words are scored, not written: "
            "leave it out, or use --decide_by generation"
        )
    return WordScorer(
        completer,
        how,
        how.words,
        task.inputs,
        calibrated=args.calibrate,
        length_normalize=args.length_normalize,
        progress=True,
    )


def _run_once(icl: Icl, seed: int, folder: Path) -> Outcome:
    choice = icl.run.selection.choice(icl.fixed, seed)
    identity = icl.identity(choice)
    check_writable(folder)
    check_same_run(folder, identity)
    if (folder / METRICS_FILE).is_file() and (folder / IDENTITY_FILE).is_file():
        logger.info("run: %s is finished (reused)", folder)
        return Outcome(folder, read_object(folder / METRICS_FILE), reused=True)
    with _timed(icl, "exemplars"):
        chosen = icl.pool.choose(icl.queries, choice, icl.likeness)
    _tell_leaks(chosen)
    if icl.decider is None or icl.completer is None:
        shown = Shown.whole(chosen)
        answered = vote_all(icl.inputs, chosen)
    else:
        with _timed(icl, "prompts"):
            shown = _fit(icl, icl.completer, icl.decider, chosen, seed)
            prompts = [
                icl.decider.prompts(_examples(icl, rows), query)
                for rows, query in zip(shown.rows, icl.queries, strict=True)
            ]
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PROMPT_FILE, prompts[0][0] + "\n")
        with _timed(icl, "answers"):
            answered = icl.decider.decide(icl.queries, prompts)
        _tell_asked(icl.completer)
    write_json(folder / IDENTITY_FILE, identity)
    write_json(folder / ARGUMENTS_FILE, icl.run.sections())
    metrics = write_run(
        folder, icl.run, icl.inputs, shown, answered, seed=seed, seconds=icl.seconds, made=identity
    )
    return Outcome(folder, metrics, reused=False)


def _examples(icl: Icl, rows: Sequence[int]) -> list[Example]:
    return [icl.inputs.pool[row] for row in rows]


def _fit(icl: Icl, completer: Completer, decider: Decider, chosen: Chosen, seed: int) -> Shown:
    """Leave out what does not fit, and put the others into the order of the prompt."""
    order = icl.run.selection.order

    def shown(place: int, count: int) -> list[int]:
        rows = chosen.of(place)[:count]
        return arrange(rows, order, query=icl.queries[place].text, seed=seed)

    def write(place: int, count: int) -> Sequence[str]:
        return decider.prompts(_examples(icl, shown(place, count)), icl.queries[place])

    fit: Fit = fit_prompts(
        completer,
        write,
        chosen.counts.tolist(),
        names=[query.id for query in icl.queries],
        num_new_tokens=decider.num_new_tokens,
    )
    if fit.num_dropped.any():
        logger.warning(
            "%d of %d queries got fewer exemplars than the %d chosen, so that their prompts fit "
            "the LM's %d tokens (%d left out in all)",
            int((fit.num_dropped > 0).sum()),
            len(icl.queries),
            icl.run.selection.count,
            completer.window,
            int(fit.num_dropped.sum()),
        )
    rows = [shown(place, count) for place, count in enumerate(fit.counts.tolist())]
    return Shown(chosen, rows, fit)


def _tell_leaks(chosen: Chosen) -> None:
    if chosen.num_dropped.any():
        logger.info(
            "leak guard: %d examples were left out, being nearly the text of one of %d queries",
            int(chosen.num_dropped.sum()),
            int((chosen.num_dropped > 0).sum()),
        )


def _tell_asked(completer: Completer) -> None:
    if isinstance(completer, KeptCompleter):
        logger.info(
            "answers: the LM was asked %d prompts, %d were answered before (reused)",
            completer.num_asked,
            completer.num_found,
        )


@contextmanager
def _timed(icl: Icl, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    icl.seconds[stage] = time.perf_counter() - start
