"""The names of the Python API, each with its home; `pgra/__init__.py` reads them from here."""

from pgra.data.tasks import Task
from pgra.encoders.encoder import Encoder
from pgra.errors import PgraError
from pgra.exemplars.selector import ExemplarSelector
from pgra.experiments.worth import worth
from pgra.lm.causal_lm import CausalLM
from pgra.memory.memory import Memory
from pgra.methods.classifier import Classifier
from pgra.reader.record import Reader
from pgra.report.results import Answer
from pgra.rerank.base import BaseReranker, RerankRequest
from pgra.rerank.reranker import Reranker
from pgra.retrieval.dense import Index
from pgra.runs import Run, train
from pgra.types import Candidates, Example, Hit

__version__: str

__all__ = [
    "Answer",
    "BaseReranker",
    "Candidates",
    "CausalLM",
    "Classifier",
    "Encoder",
    "Example",
    "ExemplarSelector",
    "Hit",
    "Index",
    "Memory",
    "PgraError",
    "Reader",
    "RerankRequest",
    "Reranker",
    "Run",
    "Task",
    "train",
    "worth",
]
