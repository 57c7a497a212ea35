"""A trained run on new queries: evidence by its own index, bank and prompt, then its reader.

No training data is read: the reader's folder holds the prompt. Only with exemplars "knn" each new
query has neighbors to be found, and the training data must be where it was. Corpus, index and LM
must be those that the run was made with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pgra.config import PgraArguments
from pgra.errors import ArtifactError
from pgra.evaluation.results import EvidenceLine, add_attention
from pgra.io import check_fingerprint
from pgra.memory.labels import Correction, LabelMemory, mix_labels
from pgra.models.loading import find_model
from pgra.pipelines.found import evidence_lines
from pgra.pipelines.pgra import read_task
from pgra.pipelines.run_folder import arguments_from
from pgra.pipelines.stages import EvidenceSearch
from pgra.reader.queries import Query
from pgra.reader.record import RECORD_FILE, ReaderRecord, find_reader
from pgra.reader.trained import Reader
from pgra.rerank import PromptedReranker, Reference
from pgra.types import Example, Json, Prediction


@dataclass(frozen=True)
class Answer:
    """What a run says of a query.

    Attributes:
        query: The query.
        prediction: The label, and the probability of each.
        evidence: What the reader read beside it, best first.
        corrections: What a memory gave for it, the nearest first.
        unaided: The prediction without them; None where there are none.
    """

    query: Example
    prediction: Prediction
    evidence: Sequence[EvidenceLine]
    corrections: Sequence[Correction] = ()
    unaided: Prediction | None = None

    def with_memory(self, memory: LabelMemory, weight: float) -> "Answer":
        """Give the same answer with a memory's corrections mixed in, if any are near.

        Args:
            memory: Of the run's task.
            weight: Theirs; see `pgra.memory.labels.mix_labels`.
        """
        found = memory.recall(self.query.fields)
        if not found:
            return self
        mixed = mix_labels(self.prediction, found, weight=weight)
        return replace(self, prediction=mixed, corrections=found, unaided=self.prediction)


class Predictor:
    """A trained run, loaded once for any number of queries.

    Attributes:
        reader: Its reader.
        search: Its stages; None for a plain T5, which searches nothing.
    """

    def __init__(self, reader: Reader, search: EvidenceSearch | None) -> None:
        self.reader, self.search = reader, search

    @classmethod
    def open(cls, folder: Path, *, artifacts_dir: str | None = None, device: str = "auto") -> Self:
        """Load a run.

        Args:
            folder: The run, or its reader's folder, wherever that was moved.
            artifacts_dir: Folder of its index and bank; None is where they were.
            device: What computes, whatever the run's was.

        Raises:
            ArtifactError: If the reader is not whole, or corpus, index or LM are not those that it
                was trained with; what differs is named.
            PgraError: As each stage says.
        """
        home = find_reader(folder)
        changes = {"device": device}
        if artifacts_dir is not None:
            changes["artifacts_dir"] = artifacts_dir
        reader = Reader.load(home, device=device)
        args = _arguments(home, reader.record, changes)
        if reader.num_evidence == 0:
            return cls(reader, None)
        return cls(reader, _open_search(home, reader.record, args))

    def answer(self, queries: Sequence[Query], *, attention: bool = False) -> list[Answer]:
        """Find evidence for queries and decide them.

        Args:
            queries: Texts, or mappings of the task's inputs to texts.
            attention: Whether to say what share of the reader's attention each evidence gets.

        Raises:
            PgraError: As `Reader.predict` and each stage.
        """
        examples = self.reader.examples(queries)
        lines: list[list[EvidenceLine]] = [[] for _ in examples]
        if self.search is not None and examples:
            ranked = self.search.find(examples)
            best = ranked.best.top(self.reader.num_evidence)
            lines = evidence_lines(self.search.corpus, ranked.first, best)
        fields = [example.fields for example in examples]
        texts = [[line.text for line in found] for found in lines]
        predictions = self.reader.predict(fields, texts)
        if attention:
            lines = add_attention(lines, self.reader.attention(fields, texts))
        return [Answer(*parts) for parts in zip(examples, predictions, lines, strict=True)]


def _arguments(home: Path, record: ReaderRecord, runtime: Mapping[str, Any]) -> PgraArguments:
    """Read a run's arguments; dtypes that depend on the device stay what they were."""
    changes: dict[str, dict[str, Any]] = {"runtime": dict(runtime)}
    lm = record.fingerprints.get("reranker")
    encoder = _encoder_fields(record) or _exemplar_encoder(lm)
    if isinstance(lm, Mapping) and "dtype" in lm:
        changes["rerank"] = {"lm_dtype": lm["dtype"]}
    if encoder is not None:
        changes["retriever"] = {"encoder_dtype": encoder["dtype"]}
    try:
        return arguments_from(record.arguments, changes)
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"{home / RECORD_FILE} holds arguments that this version of pgra does not know "
            f"({error}): use the version that it names, or train again"
        ) from None


def _encoder_fields(record: ReaderRecord) -> Mapping[str, Json] | None:
    """Find what a run's index says of its encoder; None if it has none."""
    index = record.fingerprints.get("index")
    dense = index.get("dense", index) if isinstance(index, Mapping) else None
    return dense if isinstance(dense, Mapping) and "encoder" in dense else None


def _exemplar_encoder(lm: Json) -> Mapping[str, Json] | None:
    """Find what a run's reranker says of the first stage's encoder, where that finds exemplars.

    A first stage by words has none, so that its index does not tell.
    """
    told = lm.get("exemplar encoder") if isinstance(lm, Mapping) else None
    return told if isinstance(told, Mapping) and "part" not in told else None


def _open_search(home: Path, record: ReaderRecord, args: PgraArguments) -> EvidenceSearch:
    """Open the stages; refuse what is not the run's before anything long is begun."""
    assert record.prompt is not None  # it has evidence
    if not args.artifacts.is_dir():
        raise ArtifactError(
            f"{args.artifacts} does not exist, where the run's index and bank are looked for: name "
            "their folder with --artifacts_dir"
        )
    # Its own neighbors stand before each query: the training examples are the one thing that the
    # reader's folder does not hold. That they are the run's, the reranker's fingerprint tells.
    exemplars = read_task(args).exemplars if args.rerank.exemplars == "knn" else None
    made = record.fingerprints
    lm = made.get("reranker")
    reference = Reference(made=lm if isinstance(lm, Mapping) else {})
    search = EvidenceSearch(args, record.prompt, exemplars=exemplars, reference=reference)
    _check(home, "corpus", made.get("corpus"), search.corpus.fingerprint["corpus_sha256"])
    _check(home, "reranker", made.get("reranker"), dict(search.reranker.fingerprint))
    if isinstance(search.reranker, PromptedReranker):  # before an index would be built
        search.reranker.fitting.check()
    if args.is_exhaustive:
        return search
    encoder = _encoder_fields(record)
    if encoder is not None:  # its folder's digest tells before an index would be built with it
        _check(home, "encoder", encoder["encoder"], find_model(args.retriever.encoder).identity)
    _check(home, "index", made.get("index"), dict(search.retriever.fingerprint))
    return search


def _check(home: Path, stage: str, made: Json, asked: Json) -> None:
    """Refuse a stage that is not the run's; the first field that differs is named."""
    pair = [
        {f"{stage} {name}": field for name, field in value.items()}
        if isinstance(value, Mapping)
        else {stage: value}
        for value in (made, asked)
    ]
    try:
        check_fingerprint(home, made=pair[0], asked=pair[1])
    except ArtifactError as error:
        reason = str(error).removesuffix(": use another folder or build it again")
        reason = reason.replace("this run asks for", "what is there now is")
        raise ArtifactError(f"{reason}: restore it, or train again") from None
