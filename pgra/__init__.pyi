"""The names of the Python API, each with its home; `pgra/__init__.py` reads them from here."""

from pgra.core import Candidates, Context, Example, Hit, Prediction
from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.data.examples import DataArguments, Splits, load_splits
from pgra.data.tasks import Task
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ConfigError, DataError, ModelError, PgraError
from pgra.exemplars.selector import ExemplarSelector, build_prompt
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.memory.log import MemoryEntry
from pgra.memory.memory import Memory
from pgra.methods.arguments import PgraArguments, RunArguments, RuntimeArguments
from pgra.methods.base import Method
from pgra.methods.stages import Stages
from pgra.prompts.fewshot import FewShotPrompt, PromptTemplate, prompt_template
from pgra.reader.arguments import ReaderArguments, TrainingArguments
from pgra.reader.fid import FusionReader
from pgra.reader.record import Reader
from pgra.rerank import open_reranker
from pgra.rerank.base import BaseReranker, RerankArguments, RerankRequest
from pgra.rerank.reranker import Reranker
from pgra.retrieval.base import RetrieverArguments, open_retriever
from pgra.retrieval.dense import Index
from pgra.runs import Answer, Run, evaluate_run, run, run_seeds, train

__version__: str

__all__ = [
    "Answer",
    "ArtifactError",
    "BaseReranker",
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
    "ExemplarSelector",
    "FewShotPrompt",
    "FusionReader",
    "Hit",
    "Index",
    "Memory",
    "MemoryEntry",
    "Method",
    "ModelError",
    "PgraArguments",
    "PgraError",
    "Prediction",
    "PromptTemplate",
    "PromptedEncoder",
    "Reader",
    "ReaderArguments",
    "RerankArguments",
    "RerankRequest",
    "Reranker",
    "RetrieverArguments",
    "Run",
    "RunArguments",
    "RuntimeArguments",
    "Splits",
    "Stages",
    "Task",
    "TrainingArguments",
    "build_prompt",
    "evaluate_run",
    "load_splits",
    "open_corpus",
    "open_reranker",
    "open_retriever",
    "prompt_template",
    "run",
    "run_seeds",
    "train",
]
