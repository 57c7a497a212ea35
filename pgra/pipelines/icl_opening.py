"""Opens what a run of in-context learning needs: data, pool, comparison, LM, and what asks it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pgra.data.generation import GenerationTask
from pgra.errors import ConfigError
from pgra.icl.choice import Choice
from pgra.icl.completion import Completer
from pgra.icl.deciding import Decider, TextWriter, WordScorer, WordWriter
from pgra.icl.formats import LineFormat, task_format
from pgra.icl.likeness import Likeness
from pgra.icl.opening import open_kept_completer
from pgra.icl.selection import ExemplarPool
from pgra.pipelines.icl_inputs import IclInputs, IclRun, open_likeness, read_fixed, read_inputs
from pgra.pipelines.icl_memory import Recalled, recall_all
from pgra.processes import Processes
from pgra.retrieval.leaks import LEAK_RULE
from pgra.types import Example, Json

OpenLm = Callable[[IclRun, Processes], Completer]
_WRITTEN_TOKENS = 10  # KATE's max_tokens


@dataclass(frozen=True)
class Icl:
    """One task's pool, queries, comparison and LM, opened once for all seeds.

    Attributes:
        run: The arguments.
        inputs: Pool and queries.
        pool: The pool, to choose from.
        likeness: What compares; None where exemplars are drawn or fixed.
        recalled: What a memory gave the queries; nothing where none is named.
        completer: The LM; None with `--decide_by vote`.
        decider: What asks it; None likewise.
        fixed: Rows of the pool that a file names.
        seconds: Wall-clock time by stage.
        processes: Who share the prompts out; the main one writes.
    """

    run: IclRun
    inputs: IclInputs
    pool: ExemplarPool
    likeness: Likeness | None
    recalled: Recalled
    completer: Completer | None = None
    decider: Decider | None = None
    fixed: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    processes: Processes = Processes()  # noqa: RUF009 (frozen)

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
            "leak_rule": LEAK_RULE,
            "seed": choice.seed,
            **self.inputs.fingerprint,
        }
        if self.likeness is not None:
            named["likeness"] = dict(self.likeness.fingerprint)
        if self.decider is not None and self.completer is not None:
            named["prompt"] = dict(self.decider.fingerprint)
            named["lm"] = dict(self.completer.fingerprint)
            named["window"] = self.completer.window
        if self.recalled.fingerprint:
            named["memory"] = dict(self.recalled.fingerprint)
        return named


def open_lm(run: IclRun, processes: Processes = Processes()) -> Completer:  # noqa: B008 (frozen)
    """Open the LM that answers, with the answers it gave before.

    Raises:
        PgraError: As `run_icl`.
    """
    return open_kept_completer(
        run.completer, artifacts=run.artifacts, device=run.icl.device, processes=processes
    )


def open_icl(
    run: IclRun,
    inputs: IclInputs | None = None,
    *,
    lm: OpenLm = open_lm,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Icl:
    """Open pool, comparison, memory and LM; weights are loaded when they are first needed.

    Args:
        run: Everything.
        inputs: Pool and queries; None reads the run's own.
        lm: Opens the LM, where several runs share it.
        processes: Who share the prompts out.

    Raises:
        PgraError: As `run_icl`.
    """
    inputs = read_inputs(run) if inputs is None else inputs
    run = _settle(run, inputs)
    root = run.artifacts / "neighbors" / inputs.task.name
    pool = ExemplarPool(inputs.pool, jaccard=run.selection.leak_jaccard, root=root)
    pool.check(run.selection.count)
    likeness, recalled = open_likeness(run, inputs), recall_all(run, inputs)
    icl = Icl(run, inputs, pool, likeness, recalled, processes=processes)
    if run.selection.exemplar_file is not None:
        path = Path(run.selection.exemplar_file).expanduser()
        icl = replace(icl, fixed=read_fixed(path, inputs, run.selection.count))
    if run.icl.decide_by == "vote":
        return icl
    completer = lm(run, processes)
    decider = _open_decider(run, inputs, completer, progress=processes.worker.is_main)
    return replace(icl, completer=completer, decider=decider)


def _settle(run: IclRun, inputs: IclInputs) -> IclRun:
    """Fill in what the task decides where the user does not, and refuse what it does not have."""
    task, count = inputs.task, run.selection.num_exemplars
    if isinstance(task, GenerationTask):
        _refuse_labels(run, task.name)
        count = task.num_exemplars if count is None else count
        decide_by, format_ = run.icl.decide_by or "generation", "kate"
    else:
        decide_by, format_ = run.icl.decide_by or "score", run.icl.prompt_format or "task"
    selection = replace(
        run.selection, num_exemplars=run.selection.count if count is None else count
    )
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


def _open_decider(
    run: IclRun, inputs: IclInputs, completer: Completer, *, progress: bool
) -> Decider:
    args, task = run.icl, inputs.task
    if isinstance(task, GenerationTask):
        return TextWriter(
            completer,
            LineFormat(task.frame, {}),
            max_new_tokens=args.max_new_tokens or task.max_new_tokens,
            stop=task.stop,
            progress=progress,
        )
    how = task_format(task, args.prompt_format or "task")
    if args.decide_by == "generation":
        most = args.max_new_tokens or _WRITTEN_TOKENS
        return WordWriter(completer, how, most, progress=progress, words=how.words)
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
        progress=progress,
    )
