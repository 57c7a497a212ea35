"""What a reader of a run's numbers must know beside them: bundled models and data, leaks."""

from collections.abc import Sequence

from pgra.config import PgraArguments
from pgra.data.bundled import BUNDLED_DATA
from pgra.models.bundled import BUNDLED_MODELS
from pgra.models.loading import BUNDLED
from pgra.pipelines.exemplars import neighbor_model
from pgra.pipelines.found import Found


def evidence_models(args: PgraArguments) -> list[str]:
    """Name the models that find the reader's evidence, or its demonstrations; none without any."""
    if args.system == "lm-bff":
        return [args.retriever.encoder]
    if args.rerank.num_evidence == 0:
        return []
    models = [args.retriever.encoder] if args.retriever.retriever in ("dense", "hybrid") else []
    if args.rerank.reranker != "prompted":
        return models
    models += [neighbor_model(args)] if args.rerank.exemplars == "knn" else []
    return list(dict.fromkeys([*models, args.rerank.lm]))


def run_notes(args: PgraArguments, found: Found, models: Sequence[str]) -> list[str]:
    """Gather what a reader of the numbers must know.

    Args:
        args: Which data and corpus.
        found: The examples.
        models: Names of all models that the run used, as the user wrote them.
    """
    sources = args.corpus.sources if found.depth else ()
    shared = found.splits.notes.get("test_rows_in_train")
    return [
        *bundled_notes(models, [args.data.dataset_name or "", *sources]),
        *([f"{shared} test texts also stand in the training file"] if shared else []),
    ]


def bundled_notes(models: Sequence[str], data: Sequence[str]) -> list[str]:
    """Gather what is to be known of bundled models and data among some names.

    Args:
        models: Names of models, as the user wrote them.
        data: Names of data sets and corpora.
    """
    notes = []
    for name in models:
        model = BUNDLED_MODELS.get(name.removeprefix(BUNDLED)) if BUNDLED in name else None
        notes += [f"{name}: {model.note}"] if model and model.note else []
    for name in data:
        part = BUNDLED_DATA.get(name.removeprefix(BUNDLED)) if BUNDLED in name else None
        notes += [f"{name}: {part.note}"] if part and part.note else []
    return notes
