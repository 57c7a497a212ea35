"""What a grid costs before it is run: the texts that the LM has yet to read, once a bank."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pgra.config import PgraArguments
from pgra.errors import PgraError
from pgra.pipelines.ablate import GridRun, in_order, width
from pgra.pipelines.pgra import open_stages, read_task
from pgra.pipelines.plan import make_plan
from pgra.rerank import AveragedReranker, NeighborReranker, PromptedReranker
from pgra.rerank.similarity import WAYS


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
        return _count(runs, known)
    except PgraError as error:
        return Cost(runs, None, is_exact=False, note=" ".join(str(error).split()))


def _count(runs: Sequence[GridRun], known: dict[str, str]) -> Cost:
    """Count what is not told of yet; `known` has points by what they read of which bank."""
    args = runs[0].args
    bank, stage = _bank(args), _stage(args)
    is_fitted = WAYS[args.rerank.similarity].is_fitted
    read = [bank if stage == "whole" else f"{bank} {stage}"]
    if is_fitted and stage != "whole":
        read.append(f"{read[0]} sample")
    other = known.get(bank) or known.get(read[0])
    if bank in known or all(part in known for part in read):
        return Cost(runs, 0, is_exact=True, note=f"shares the bank of {other}")
    plan = make_plan(args, seconds=0)
    texts, note, to_read = plan.texts, "", plan.texts.to_read
    if other is not None:  # only what the similarity is fitted to is new
        plain = replace(args, rerank=replace(args.rerank, similarity="dot"))
        to_read -= make_plan(plain, seconds=0).texts.to_read
        note = f", behind {other}"
    if plan.has_own_prefixes:
        note = f": k + 1 a query under its own prefix, about {plan.reading.tokens:,} tokens"
    for part in read:
        known.setdefault(part, runs[0].point.name)
    return Cost(runs, to_read, texts.is_exact, f"{texts.basis}{note}" if to_read else "all read")


def _bank(args: PgraArguments) -> str:
    """Tell banks apart by their folder, which holds the hash of all that states depend on."""
    found = read_task(args)
    open_stages(found, args)
    if isinstance(found.reranker, NeighborReranker) and found.exemplars is not None:
        return f"{found.reranker.bank.folder} {found.exemplars.fingerprint}"
    if isinstance(found.reranker, AveragedReranker):
        return " ".join(str(member.bank.folder) for member in found.reranker.members)
    assert isinstance(found.reranker, PromptedReranker)
    return str(found.reranker.bank.folder)


def _stage(args: PgraArguments) -> str:
    """Tell first stages apart, but for k."""
    if width(args) == float("inf"):
        return "whole"
    values = asdict(args.retriever)
    return str({name: value for name, value in values.items() if name != "num_candidates"})
