"""Arguments of a run."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pgra.config import Arguments, arg
from pgra.data.corpus import CorpusArguments
from pgra.data.examples import DataArguments
from pgra.errors import ConfigError
from pgra.exemplars import SELECTORS, SelectionArguments
from pgra.lm.base import CompleterArguments
from pgra.prompts import FORMATS
from pgra.reader.arguments import ReaderArguments, TrainingArguments
from pgra.rerank.base import CrossEncoderArguments, RerankArguments
from pgra.retrieval.base import RetrieverArguments
from pgra.retrieval.trec import RunFileArguments


@dataclass(kw_only=True)
class RuntimeArguments(Arguments):
    """Which method decides, where products go, and what computes them."""

    GROUP = "Output"

    method: str = arg(
        "pgra",
        "What decides labels. Trained readers: pgra (as the arguments say), exhaustive (without a "
        "first stage), fid (the first stage's best), random (random passages), plain (no "
        "evidence), rag (each evidence alone, the query encoder trained too), lm-bff (few shots, "
        "with demonstrations), ralm (a causal LM that reads the evidence in its prompt). Without "
        "training: icl (a frozen LM with examples drawn once), kate (with each query's "
        "nearest), knn (nearest training examples). Or a class of your own: module:Class. Each "
        "has its own arguments: see --method NAME --help.",
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
class FolderArguments(Arguments):
    """Where a run that trains nothing is, and its seed."""

    GROUP = "Output"

    output_dir: str = arg(
        "runs/{task}-{method}-seed{seed}", "The run's folder.", decides=False, is_common=True
    )
    seed: int = arg(
        0, "Seed of what is drawn, if anything is.", least=0, is_common=True, group="Training"
    )


@dataclass(kw_only=True)
class AnswerArguments(Arguments):
    """How prompts are written and answers taken."""

    GROUP = "LM"

    prompt_format: str | None = arg(
        None,
        "task (the template of the task's YAML, with PGRA's instruction) or kate (the paper's: "
        "'Sentence: ... Label: Positive'); default: task, and kate where a task writes answers.",
        choices=FORMATS,
        is_common=True,
    )
    decide_by: str | None = arg(
        None,
        "score (the likeliest label word), generation (what the LM writes), or vote (no LM: the "
        "majority of the exemplars, of a tie the nearest); default: score, and generation where a "
        "task has no labels or an endpoint scores no words.",
        choices=("generation", "score", "vote"),
        is_common=True,
    )
    max_new_tokens: int | None = arg(
        None,
        "Most tokens that are written; default: the task's, 10 where labels are written.",
        least=1,
    )
    query_dataset_name: str | None = arg(
        None,
        "Take the test split of another data set for queries: hub id, local folder or "
        "bundled:NAME (the paper: SST-2 examples, IMDB queries); --test_file names a file.",
    )


@dataclass(kw_only=True)
class IclSelectionArguments(SelectionArguments):
    """Which labelled examples stand before all queries: PGRA's, unless it is said otherwise."""

    exemplars: str = arg(
        "balanced",
        "How they are chosen: see --method kate.",
        choices=SELECTORS,
        is_open=True,
        is_common=True,
    )
    exemplar_seed: int | None = arg(0, "Seed of what is drawn, as of PGRA's prompt.", least=0)


@dataclass(kw_only=True)
class LmBffArguments(Arguments):
    """The few examples, and what stands beside each."""

    GROUP = "Reader"

    num_shots: int = arg(
        16,
        "Examples of each label that lm-bff trains on; as many others choose the checkpoint.",
        least=2,  # an example's label needs another one to show
        is_common=True,
    )
    exemplar_sets: int = arg(
        16, "Sets of demonstrations, one of each label, that lm-bff reads an example with.", least=1
    )
    exemplar_share: float = arg(
        0.5,
        "Share of a label's examples, the nearest, that lm-bff takes demonstrations from.",
        above=0,
        most=1,
    )


@dataclass(kw_only=True)
class RalmArguments(Arguments):
    """The causal LM that reads a query after its evidence."""

    GROUP = "Reader"

    reader_lm: str = arg(
        "HuggingFaceTB/SmolLM2-135M",
        "Reader, any causal LM, which stays as it is: hub id, folder or bundled:NAME. --lm_dtype, "
        "--lm_device_map and --lm_batch_tokens go for it too.",
        decides=False,
        is_common=True,
    )
    max_reader_tokens: int = arg(
        1024,
        "Most tokens of a prompt and its answer, at most the LM's window; the worst evidence is "
        "cut first, the query never.",
        least=8,
    )

    @property
    def model_name_or_path(self) -> str:
        """The reader, under other readers' name for it."""
        return self.reader_lm


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

    @property
    def always_reads_evidence(self) -> bool:
        return "reranker" in self.decided and "num_evidence" not in self.decided


_PGRA = {
    "corpus": CorpusArguments,
    "retriever": RetrieverArguments,
    "rerank": RerankArguments,
    "reader": ReaderArguments,
    "training": TrainingArguments,
}
_KATE = {
    "completer": CompleterArguments,
    "selection": SelectionArguments,
    "icl": AnswerArguments,
}
_UNTRAINED = {name: cls for name, cls in _PGRA.items() if name != "training"}
_CLASS = "pgra.methods.pgra:Pgra"
# Those of one class are told by what is decided, the first that fits: `PgraArguments.method`.
METHODS: Mapping[str, MethodEntry] = {
    "plain": MethodEntry(_CLASS, _PGRA, {"num_evidence": 0}),
    "random": MethodEntry(_CLASS, _PGRA, {"retriever": "random", "reranker": "none"}),
    "fid": MethodEntry(_CLASS, _PGRA, {"reranker": "none"}),
    "exhaustive": MethodEntry(_CLASS, _PGRA, {"retriever": "exhaustive", "reranker": "prompted"}),
    "pgra": MethodEntry(_CLASS, _PGRA),
    "rag": MethodEntry("pgra.methods.rag:Rag", _PGRA, {"retriever": "dense", "reranker": "none"}),
    "lm-bff": MethodEntry(
        "pgra.methods.lm_bff:LmBff",
        {**_PGRA, "shots": LmBffArguments},
        {"num_evidence": 0, "reranker": "none"},
    ),
    "ralm": MethodEntry("pgra.methods.ralm:Ralm", {**_UNTRAINED, "reader": RalmArguments}),
    "knn": MethodEntry("pgra.methods.knn:NearestNeighbors", _UNTRAINED, {"num_evidence": 0}),
    "icl": MethodEntry("pgra.methods.kate:Icl", {**_KATE, "selection": IclSelectionArguments}),
    "kate": MethodEntry("pgra.methods.kate:Kate", _KATE),
}


def decided_by(method: str) -> Mapping[str, Any]:
    """Return the arguments that a method decides, by name; one from outside decides none."""
    return METHODS[method].decided if method in METHODS else {}


# Own arguments of our retrievers and rerankers.
OPTIONS: Mapping[str, Mapping[str, type]] = {
    "retriever": {"run": RunFileArguments},
    "reranker": {"cross-encoder": CrossEncoderArguments},
}


Section = TypeVar("Section", RetrieverArguments, RerankArguments)


def check_depths(retriever: RetrieverArguments, rerank: RerankArguments) -> None:
    """Refuse stages that contradict each other, such as d > k, with a ConfigError."""
    name = retriever.retriever
    if name in ("exhaustive", "random") and retriever.index_dir is not None:
        raise ConfigError(f"retriever '{name}' has no index: leave --index_dir out")
    if rerank.num_evidence > retriever.num_candidates:
        raise ConfigError(
            f"num_evidence ({rerank.num_evidence}) exceeds num_candidates "
            f"({retriever.num_candidates}): the reranker can only keep what the retriever returned"
        )


def _settle(part: Section, method: str) -> Section:
    """Return a section as the method decides it."""
    decided = decided_by(method).items()
    changes = {name: value for name, value in decided if getattr(part, name, value) != value}
    return replace(part, **changes) if changes else part


@dataclass(frozen=True, kw_only=True)
class PgraArguments:
    """Everything but the reader's training; the method has decided its part.

    `retriever_options` and `rerank_options` are own arguments of one retriever or reranker.
    """

    runtime: RuntimeArguments
    data: DataArguments
    corpus: CorpusArguments
    retriever: RetrieverArguments
    rerank: RerankArguments
    reader: ReaderArguments
    retriever_options: Arguments | None = None
    rerank_options: Arguments | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "retriever", _settle(self.retriever, self.runtime.method))
        object.__setattr__(self, "rerank", _settle(self.rerank, self.runtime.method))
        check_depths(self.retriever, self.rerank)
        named = self.runtime.method
        needs_evidence = named in METHODS and METHODS[named].always_reads_evidence
        if needs_evidence and not self.rerank.num_evidence:
            raise ConfigError(
                f"method '{named}' reads evidence, and num_evidence is 0: ask for at least 1, or "
                "use --method plain"
            )

    @property
    def artifacts(self) -> Path:
        return Path(self.runtime.artifacts_dir)

    @property
    def method(self) -> str:
        """The method's name for `--method`, also where the other arguments alone decide it."""
        named = self.runtime.method
        if named not in METHODS or METHODS[named].path != _CLASS:
            return named
        chosen = {**vars(self.retriever), **vars(self.rerank)}
        return next(
            name
            for name, entry in METHODS.items()
            if entry.path == _CLASS and entry.decided.items() <= chosen.items()
        )


@dataclass(frozen=True)
class RunArguments:
    """All arguments of a run, by section: `runtime`, `data`, and those of its method."""

    sections: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Let the method decide what it does; refuse contradictions between PGRA's stages."""
        if "rerank" in self.sections:
            decided = self.pgra
            own = {"retriever": decided.retriever, "rerank": decided.rerank}
            object.__setattr__(self, "sections", {**self.sections, **own})

    def __getitem__(self, section: str) -> Any:
        return self.sections[section]

    @property
    def runtime(self) -> RuntimeArguments:
        """The method, the artifacts folder and the device."""
        runtime: RuntimeArguments = self.sections["runtime"]
        return runtime

    @property
    def data(self) -> DataArguments:
        """The task and its examples."""
        data: DataArguments = self.sections["data"]
        return data

    @property
    def method(self) -> str:
        """The method's name in results."""
        if "rerank" in self.sections:
            return self.pgra.method
        return self.runtime.method.rpartition(":")[2]

    @property
    def pgra(self) -> PgraArguments:
        """The sections that PGRA's stages and readers share; the method has decided its part."""
        known = [f.name for f in dataclasses.fields(PgraArguments)]
        return PgraArguments(**{k: v for k, v in self.sections.items() if k in known})

    @property
    def home(self) -> str:
        """The section that names the run's folder and seed."""
        return "training" if self.trains else "folder"

    @property
    def trains(self) -> bool:
        """Whether the method trains weights, which a run keeps in its `reader/`."""
        return "training" in self.sections

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(str(self.sections[self.home].output_dir))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.sections[self.home].seed)

    def change(self, section: str, **changes: Any) -> "RunArguments":
        """Return these arguments with other values in a section."""
        part = copy.copy(self.sections[section])
        for name, value in changes.items():
            setattr(part, name, value)
        return RunArguments({**self.sections, section: part})

    def deciding(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the values that decide the results, by section."""
        return {name: self.sections[name].deciding() for name in names}

    def as_json(self) -> dict[str, Any]:
        """Return the content of `arguments.json`: all values by section."""
        return {
            name: dataclasses.asdict(part)
            for name, part in self.sections.items()
            if part is not None
        }
