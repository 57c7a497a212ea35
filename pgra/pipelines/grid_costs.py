"""What a grid costs before it is run: the texts that the LM has yet to read, once a bank."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pgra.config import PgraArguments
from pgra.errors import PgraError
from pgra.pipelines.ablate import GridRun, in_order, width
from pgra.pipelines.pgra import open_stages, read_task
from pgra.pipelines.plan import make_plan
from pgra.rerank import NeighborReranker, PromptedReranker


@dataclass(frozen=True)
class Cost:
    """What the LM has yet to read for the runs of one point.

    Attributes:
        runs: The point's, one a seed.
        texts: For this point alone, behind those before it; None if it cannot be told.
        is_exact: Whether that is a count, not an estimate.
        note: Why there is nothing to read, or why it cannot be told.
    """

    runs: Sequence[GridRun]
    texts: int | None
    is_exact: bool
    note: str


def foresee(runs: Sequence[GridRun]) -> list[Cost]:
    """Tell what the LM has to read for each point, in the order they run; no model runs.

    Points that share a bank are told of once. One that searches the same bank in another way may
    read some texts that another does: it is counted as if it did not.
    """
    points: dict[tuple[str | None, str], list[GridRun]] = {}
    for run in in_order(runs):
        points.setdefault((run.task, run.point.name), []).append(run)
    known: dict[str, str] = {}
    return [_foresee(own, known) for own in points.values()]


def _foresee(runs: Sequence[GridRun], known: dict[str, str]) -> Cost:
    run = runs[0]
    if run.args.system == "icl":
        return Cost(runs, None, is_exact=False, note="system icl is not foreseen")
    if run.args.rerank.num_evidence == 0 or run.args.rerank.reranker == "none":
        return Cost(runs, 0, is_exact=True, note="the LM reads nothing")
    try:
        bank, stage = _bank(run.args), _stage(run.args)
        for key in (bank, f"{bank} {stage}"):
            if key in known:
                return Cost(runs, 0, is_exact=True, note=f"shares the bank of {known[key]}")
        plan = make_plan(run.args, seconds=0)
    except PgraError as error:
        return Cost(runs, None, is_exact=False, note=" ".join(str(error).split()))
    known[bank if stage == "whole" else f"{bank} {stage}"] = run.point.name
    texts, note = plan.texts, plan.texts.basis if plan.texts.to_read else "all read"
    if plan.reading.num_prefixes > 1:
        note += f": k + 1 a query under its own prefix, about {plan.reading.tokens:,} tokens"
    return Cost(runs, texts.to_read, texts.is_exact, note)


def _bank(args: PgraArguments) -> str:
    """Tell banks apart by their folder, which holds the hash of all that states depend on."""
    found = read_task(args)
    open_stages(found, args)
    if isinstance(found.reranker, NeighborReranker) and found.exemplars is not None:
        return f"{found.reranker.bank.folder} {found.exemplars.fingerprint}"
    assert isinstance(found.reranker, PromptedReranker)
    return str(found.reranker.bank.folder)


def _stage(args: PgraArguments) -> str:
    """Tell first stages apart, but for k."""
    if width(args) == float("inf"):
        return "whole"
    values = asdict(args.retriever)
    return str({name: value for name, value in values.items() if name != "num_candidates"})
