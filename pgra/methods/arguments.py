"""Arguments of a run."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pgra.config import Arguments, Entry, arg, find_class, import_named
from pgra.context import Context
from pgra.data.corpus import CorpusArguments
from pgra.data.examples import DataArguments
from pgra.errors import ConfigError
from pgra.exemplars import SELECTORS, SelectionArguments
from pgra.lm.base import CompleterArguments
from pgra.prompts import CHATS, FORMATS
from pgra.reader.arguments import LabelBiasArguments, ReaderArguments, TrainingArguments
from pgra.rerank import RERANKERS
from pgra.rerank.arguments import HeadArguments, RerankArguments
from pgra.retrieval.arguments import RETRIEVERS, RetrieverArguments

SEED_FIELD = "{seed}"


@dataclass(kw_only=True)
class RuntimeArguments(Arguments):
    """Which method decides, where products go, and what computes them."""

    GROUP = "Output"

    method: str = arg(
        "pgra",
        "What decides. Trained readers: pgra, fid (the first "
        "stage's best), random (random passages), plain (no evidence). A frozen LM: ralm (reads "
        "the evidence), icl (after examples drawn once), kate (after each query's nearest), head "
        "(by a logistic head on its states). knn, or module:Class. Each has its own arguments: see "
        "--method NAME --help.",
        is_common=True,
        group="Method",
    )
    artifacts_dir: str = arg(
        "artifacts",
        "Folder of indexes, candidates, banks and evidence, shared by all runs.",
        decides=False,
    )
    device: str = arg(
        "auto",
        "auto (a GPU if there is one), cpu, cuda, cuda:1, ...",
        decides=False,
        is_common=True,
    )


@dataclass(kw_only=True)
class AnswerArguments(LabelBiasArguments):
    """How prompts are written and answers taken."""

    GROUP = "LM"

    prompt_format: str | None = arg(
        None,
        "task (its template) or kate ('Sentence: ... Label: ...'), the default of written answers.",
        choices=FORMATS,
        is_common=True,
    )
    decide_by: str | None = arg(
        None,
        "score (the likeliest label word), generation (what the LM writes) or vote (the exemplars'"
        " majority, no LM); default: score; generation where there are no labels or no scores.",
        choices=("generation", "score", "vote"),
        is_common=True,
    )
    max_new_tokens: int | None = arg(
        None,
        "Most tokens that are written; default: the task's, 10 where labels are written.",
        least=1,
    )
    chat_template: str = arg("off", "Off, auto or turns: see --method pgra.", choices=CHATS)
    query_dataset_name: str | None = arg(
        None,
        "Take another data set's test split for queries (the paper: SST-2 examples, IMDB queries).",
    )


@dataclass(kw_only=True)
class IclSelectionArguments(SelectionArguments):
    """Which labelled examples stand before all queries; by default PGRA's."""

    exemplars: str = arg(
        "balanced",
        "How they are chosen: see --method kate.",
        choices=SELECTORS,
        is_open="selector",
        is_common=True,
    )
    exemplar_seed: int | None = arg(0, "Seed of what is drawn, as of PGRA's prompt.", least=0)


@dataclass(kw_only=True)
class RalmArguments(LabelBiasArguments):
    """The causal LM that reads a query after its evidence."""

    GROUP = "Reader"

    reader_lm: str = arg(
        "HuggingFaceTB/SmolLM2-135M",
        "Reader, any causal LM: hub id, folder or bundled:NAME; other --lm_ flags are its too.",
        decides=False,
        is_common=True,
    )
    max_reader_tokens: int = arg(
        1024,
        "Most tokens of prompt and answer; the worst evidence is cut first, the query never.",
        least=8,
    )

    @property
    def model_name_or_path(self) -> str:
        """The reader, under other readers' name for it."""
        return self.reader_lm


# The sources of evidence that `pgra worth` compares, each by the reranker's arguments.
_STATES = ("dot", "whitened_cosine", "calibrated", "head")
SOURCES: Mapping[str, Mapping[str, Any]] = {
    "first_stage": {},
    **{name: {"reranker": "prompted", "similarity": name} for name in _STATES},
    "head_topic": {"reranker": "prompted", "similarity": "head", "topic_weight": 1.0},
    "likelihood": {"reranker": "likelihood"},
    "random": {"retriever": "random", "index_dir": None},
}


@dataclass(kw_only=True)
class WorthArguments(Arguments):
    """Which evidence, and how many queries are asked."""

    questions: str | None = arg(
        None,
        "File of questions with answers, jsonl, csv or tsv (see --columns): then --method ralm "
        "--task questions, unless others are given.",
        is_common=True,
    )
    queries: str | None = arg(
        None,
        "The queries of sources run:FILE, as pgra search takes them; default: --questions, if it "
        "has id and text.",
    )
    num_queries: int = arg(200, "Training examples, or questions, that may be asked.", least=20)
    depths: list[int] = arg([1, 2, 4], "Numbers of evidence that are tried.", least=1)
    sources: list[str] | None = arg(
        None,
        f"{', '.join(SOURCES)} (the control), given (the arguments' own reranker), run:FILE (a "
        "TREC run), 'command:WORDS' (which reads the queries, a line each, and prints a JSON list "
        "of passages for each), or a first stage such as bm25, dense; default: all of the former, "
        "of ralm first_stage and random.",
        is_common=True,
    )
    measure: str | None = arg(
        None,
        "What decides: bits (default of labels and of a T5), accuracy of labels, or of written "
        "answers a metric of the task (default of an LM: its first, contains of questions).",
    )
    budget: int | None = arg(None, "Most calls of the reader.", least=1)
    json: str | None = arg(None, "File of all numbers; - prints them.", decides=False, writes=True)


@dataclass(frozen=True)
class MethodEntry:
    """One of our methods.

    Attributes:
        path: Its class, "module:Class".
        sections: Its argument dataclasses by section, which the help reads without torch.
        decided: Arguments that make the method; they override a YAML, and other flags are refused.
    """

    path: str
    sections: Mapping[str, type]
    decided: Mapping[str, Any] = field(default_factory=dict)


# The sections of PGRA's stages and its reader, and with its training.
STAGES = {
    "corpus": CorpusArguments,
    "retriever": RetrieverArguments,
    "rerank": RerankArguments,
    "reader": ReaderArguments,
}
_PGRA = {**STAGES, "training": TrainingArguments}
_KATE = {"completer": CompleterArguments, "selection": SelectionArguments, "icl": AnswerArguments}
_CLASS = "pgra.methods.pgra:Pgra"
# Methods of one class differ in `decided`; the first that matches gives the name.
METHODS: Mapping[str, MethodEntry] = {
    "plain": MethodEntry(_CLASS, _PGRA, {"num_evidence": 0}),
    "random": MethodEntry(_CLASS, _PGRA, {"retriever": "random", "reranker": "none"}),
    "fid": MethodEntry(_CLASS, _PGRA, {"reranker": "none"}),
    "pgra": MethodEntry(_CLASS, _PGRA),
    "ralm": MethodEntry("pgra.methods.ralm:Ralm", {**STAGES, "reader": RalmArguments}),
    "head": MethodEntry("pgra.methods.head:HeadMethod", {"head": HeadArguments}),
    "knn": MethodEntry("pgra.methods.knn:NearestNeighbors", STAGES, {"num_evidence": 0}),
    "icl": MethodEntry("pgra.methods.kate:Icl", {**_KATE, "selection": IclSelectionArguments}),
    "kate": MethodEntry("pgra.methods.kate:Kate", _KATE),
}


def decided_by(method: str) -> Mapping[str, Any]:
    """Return the arguments that a method decides, by name."""
    if method in METHODS:
        return METHODS[method].decided
    decided: Mapping[str, Any] = find_class("method", method, METHODS).DECIDED
    return decided


def _arguments_of(table: Mapping[str, Entry]) -> dict[str, type | None]:
    options: dict[str, type | None] = {"none": None}
    for name, entry in table.items():
        options[name] = None if entry.arguments is None else import_named(entry.arguments)
    return options


# Own arguments of our retrievers and rerankers; None of one without.
OPTIONS: Mapping[str, Mapping[str, type | None]] = {
    "retriever": _arguments_of(RETRIEVERS),
    "reranker": _arguments_of(RERANKERS),
}


class RunArguments:
    """All arguments of a run, each section an attribute; the method has decided its part.

    Attributes:
        sections: `runtime`, `data`, and those of the method, by name.
    """

    runtime: RuntimeArguments
    data: DataArguments
    corpus: CorpusArguments
    retriever: RetrieverArguments
    rerank: RerankArguments
    reader: ReaderArguments
    training: TrainingArguments
    retriever_options: Arguments | None = None  # of one retriever alone
    rerank_options: Arguments | None = None

    def __init__(self, sections: Mapping[str, Any]) -> None:
        """Let the method decide what it does; refuse contradictions between PGRA's stages."""
        self.sections = dict(sections)
        if "rerank" not in sections:
            vars(self).update(sections)
            return
        named = sections["runtime"].method
        decided = decided_by(named)
        for name in ("retriever", "rerank"):
            section = sections[name]
            changes = {key: value for key, value in decided.items() if hasattr(section, key)}
            self.sections[name] = replace(section, **changes) if changes else section
        vars(self).update(self.sections)
        first = self.retriever.retriever
        count = self.rerank.num_evidence
        if first == "random" and self.retriever.index_dir is not None:
            raise ConfigError(f"retriever '{first}' has no index: leave --index_dir out")
        if decided and "num_evidence" not in decided and not count:
            raise ConfigError(
                f"method '{named}' reads evidence: give --num_evidence, or --method plain"
            )
        is_given = getattr(sections.get(self.output_section), "evidence", "given") == "given"
        if is_given and count > self.retriever.num_candidates:
            raise ConfigError(
                f"num_evidence ({count}) exceeds num_candidates ({self.retriever.num_candidates}): "
                "the reranker can only keep what the retriever returned"
            )

    def __getitem__(self, section: str) -> Any:
        return self.sections[section]

    @property
    def method(self) -> str:
        """The method's name in results, also where other arguments than `--method` decide it."""
        named = self.runtime.method
        if named not in METHODS or METHODS[named].path != _CLASS:
            return named.rpartition(":")[2]
        chosen = {**vars(self.retriever), **vars(self.rerank)}
        return next(
            name
            for name, entry in METHODS.items()
            if entry.path == _CLASS and entry.decided.items() <= chosen.items()
        )

    @property
    def output_section(self) -> str:
        """The section that names the run's folder and seed."""
        return "training" if self.trains else "folder"

    @property
    def trains(self) -> bool:
        """Whether the method trains weights, which a run keeps in its `reader/`."""
        return "training" in self.sections

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(str(self[self.output_section].output_dir))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self[self.output_section].seed)

    def place(self, context: Context) -> Context:
        """Return a context with the run's device and artifacts."""
        artifacts = Path(self.runtime.artifacts_dir)
        return replace(context, artifacts=artifacts, device=self.runtime.device)

    def having(self, **sections: Arguments | None) -> "RunArguments":
        """Return these arguments with other sections; None is left out."""
        merged = {**self.sections, **sections}
        return RunArguments({name: values for name, values in merged.items() if values is not None})

    def change(self, section: str, **changes: Any) -> "RunArguments":
        """Return these arguments with other values in a section, which are not checked again."""
        changed = copy.copy(self[section])
        vars(changed).update(changes)
        return self.having(**{section: changed})

    def variant(self, folder: str | Path, seed: int) -> "RunArguments":
        """Return the arguments of the run with a seed; the folder's name may hold `{seed}`."""
        name = str(folder).replace(SEED_FIELD, str(seed))
        return self.change(self.output_section, output_dir=name, seed=seed)

    def as_json(self) -> dict[str, Any]:
        """Return the content of `arguments.json`: all values by section."""
        return {name: dataclasses.asdict(values) for name, values in self.sections.items()}
