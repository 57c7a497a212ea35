"""Prompt-guided retrieval augmentation: let a language model read the right sentences first.

The names below are the Python API. They are imported when first used, so that `import pgra` costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pgra.config import (
        CorpusArguments,
        DataArguments,
        PgraArguments,
        ReaderArguments,
        RerankArguments,
        RetrieverArguments,
        RunArguments,
        RuntimeArguments,
    )
    from pgra.core import Candidates, Context, Example, Prediction
    from pgra.data.corpus import Corpus, open_corpus
    from pgra.data.examples import Splits, load_splits
    from pgra.data.tasks import Task, load_task
    from pgra.encoders.encoder import Encoder
    from pgra.errors import ArtifactError, ConfigError, DataError, ModelError, PgraError
    from pgra.exemplars.prompt import build_prompt
    from pgra.lm.causal_lm import CausalLM
    from pgra.lm.prefix import PromptedEncoder
    from pgra.methods.base import Method
    from pgra.methods.stages import Stages, prompt_template
    from pgra.prompts.fewshot import FewShotPrompt
    from pgra.prompts.template import PromptTemplate
    from pgra.reader.arguments import ReaderTrainingArguments
    from pgra.reader.fid import FusionReader
    from pgra.reader.record import Reader
    from pgra.rerank import Reranker, RerankRequest, open_reranker
    from pgra.rerank.prompted import PromptedReranker
    from pgra.retrieval import open_retriever
    from pgra.runs import Answer, Outcome, Predictor, evaluate_run, run, run_seeds

__all__ = [
    "Answer",
    "ArtifactError",
    "Candidates",
    "CausalLM",
    "ConfigError",
    "Context",
    "Corpus",
    "CorpusArguments",
    "DataArguments",
    "DataError",
    "Encoder",
    "Example",
    "FewShotPrompt",
    "FusionReader",
    "Method",
    "ModelError",
    "Outcome",
    "PgraArguments",
    "PgraError",
    "Prediction",
    "Predictor",
    "PromptTemplate",
    "PromptedEncoder",
    "PromptedReranker",
    "Reader",
    "ReaderArguments",
    "ReaderTrainingArguments",
    "RerankArguments",
    "RerankRequest",
    "Reranker",
    "RetrieverArguments",
    "RunArguments",
    "RuntimeArguments",
    "Splits",
    "Stages",
    "Task",
    "build_prompt",
    "evaluate_run",
    "load_splits",
    "load_task",
    "open_corpus",
    "open_reranker",
    "open_retriever",
    "prompt_template",
    "run",
    "run_seeds",
]

_HOMES = {
    "pgra.config": (
        *(
            "CorpusArguments",
            "DataArguments",
            "PgraArguments",
            "ReaderArguments",
            "RerankArguments",
        ),
        *("RetrieverArguments", "RunArguments", "RuntimeArguments"),
    ),
    "pgra.data.corpus": ("Corpus", "open_corpus"),
    "pgra.data.examples": ("Splits", "load_splits"),
    "pgra.data.tasks": ("Task", "load_task"),
    "pgra.errors": ("ArtifactError", "ConfigError", "DataError", "ModelError", "PgraError"),
    "pgra.lm.causal_lm": ("CausalLM",),
    "pgra.encoders.encoder": ("Encoder",),
    "pgra.reader.fid": ("FusionReader",),
    "pgra.lm.prefix": ("PromptedEncoder",),
    "pgra.methods.base": ("Method",),
    "pgra.methods.stages": ("Stages", "prompt_template"),
    "pgra.runs": ("Answer", "Outcome", "Predictor", "evaluate_run", "run", "run_seeds"),
    "pgra.exemplars.prompt": ("build_prompt",),
    "pgra.prompts.fewshot": ("FewShotPrompt",),
    "pgra.prompts.template": ("PromptTemplate",),
    "pgra.reader.arguments": ("ReaderTrainingArguments",),
    "pgra.reader.record": ("Reader",),
    "pgra.rerank": ("RerankRequest", "Reranker", "open_reranker"),
    "pgra.rerank.prompted": ("PromptedReranker",),
    "pgra.retrieval": ("open_retriever",),
    "pgra.core": ("Candidates", "Context", "Example", "Prediction"),
}
"""Public names by the module they live in."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pgra' has no attribute '{name}'")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
