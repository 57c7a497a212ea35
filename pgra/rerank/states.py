"""The prompted reranker: an LM reads query and documents under one prompt.

Guo et al. 2023, section 2.2: states by eq. 2, similarity by eq. 3. The softmax of eq. 3 does not
change the order, so scores are the plain products; others are in `pgra.rerank.similarity`.
`StateRanker` scores texts in memory, `BankedReranker` a run's candidates.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file

from pgra.arrays import Rows, Scores, Vectors
from pgra.artifacts import (
    TemporaryFolder,
    at_home,
    check_fingerprint,
    find_damage,
    read_sealed,
    record_files,
    without_folders,
    without_home,
    write_sealed,
)
from pgra.context import Context
from pgra.data.read import fetch_folder, push_folder
from pgra.errors import ArtifactError, DamageError
from pgra.lm import as_state_lm
from pgra.lm.base import DEPTHS
from pgra.lm.load import batch_budget
from pgra.lm.prefix import PromptedEncoder
from pgra.lm.state_lm import StateLM
from pgra.prompts import FewShotPrompt
from pgra.rerank.arguments import AUTO, FitData, choose_similarity
from pgra.rerank.bank import Bank, bank_folder, bank_name
from pgra.rerank.base import RerankRequest, ScoringReranker, query_key, query_keys
from pgra.rerank.similarity import FIT_FILE, Fitting, Similarity, find_similarity, score_candidates
from pgra.retrieval.base import whole_path
from pgra.types import MISSING_ROW, Example, Fields

logger = logging.getLogger(__name__)

_MOST_NUMBERS = 1 << 28  # of states in memory, a gigabyte
_RECORD_FILE = "prompted.json"


def choose_for_texts(similarity: str, data: FitData) -> str:
    """Return what `auto` stands for where texts come with the query: head, or else calibrated."""
    if similarity != AUTO:
        return similarity
    return "head" if choose_similarity(data) == "head" else "calibrated"


class StateRanker:
    """Scores texts by the similarity of their prompted states to a query's.

    The prompt's prefix runs once, and no text is read twice: states are kept in memory, up to a
    gigabyte.

    Attributes:
        encoder: The LM under the prompt.
        data: Training queries that the prompt does not show, and label words.
        similarity: The name of how states are compared.
        fitted: The similarity itself; None before it is fitted.
    """

    def __init__(self, encoder: PromptedEncoder, similarity: str, data: FitData) -> None:
        """Take an encoder of what the similarity, of `choose_for_texts`, reads."""
        self.encoder = encoder
        self.data = data
        self.similarity = choose_for_texts(similarity, data)
        cls = find_similarity(self.similarity)
        self._fits_itself = similarity == AUTO or bool(cls.content_free)
        self.fitted: Similarity | None = None if cls.is_fitted else cls()
        self._states: dict[int, Vectors] = {}

    @property
    def inputs(self) -> Sequence[str]:
        """What a query is read by."""
        return self.encoder.prompt.template.inputs

    def fit(self, texts: Sequence[str], queries: Sequence[Example] | None = None) -> None:
        """Fit the similarity to texts and training queries; None are those of `data`.

        Raises:
            ConfigError: If there are too few of either, or a label has no example.
        """
        data = self.data if queries is None else replace(self.data, queries=queries)
        fitting = Fitting(self.similarity, data, self.encoder, num_rows=len(texts))
        drawn = [texts[row] for row in fitting.rows().tolist()]
        passages = self._read_passages(drawn)
        self.fitted = fitting.fit_states(passages, self._read(fitting.queries()))

    def score(self, queries: Sequence[Example], texts: Sequence[str]) -> Scores:
        """Return each text's score for each query, (B, n) float32.

        Raises:
            ValueError: If the similarity is not fitted.
        """
        similarity = self.require_fit()
        left = similarity.of_queries(self._read(queries), query_keys(queries))
        right = similarity.of_passages(self._read_passages(texts))
        scores: Scores = np.vecdot(left[:, None], right)
        return scores

    def require_fit(self) -> Similarity:
        """Return the fitted similarity; one that needs no more texts is fitted now.

        Raises:
            ValueError: If it needs some.
        """
        if self.fitted is None and self._fits_itself:
            self.fit([example.text for example in self.data.queries])
        if self.fitted is None:
            raise ValueError(
                f"similarity '{self.similarity}' is fitted: call fit(documents, examples) first"
            )
        return self.fitted

    def _read_passages(self, texts: Iterable[str]) -> Vectors:
        fields = self.encoder.prompt.template.passage_fields
        return self._read([Example("", fields(text)) for text in texts])

    def _read(self, examples: Sequence[Example]) -> Vectors:
        """Return the states of texts, (n, H); the LM reads those that are not in memory yet."""
        encoder = self.encoder
        keys = query_keys(examples).tolist()
        with encoder.lm.busy:  # of several threads one at a time
            if sum(map(len, self._states.values())) > _MOST_NUMBERS:
                self._states.clear()
            pairs = zip(keys, examples, strict=True)
            new = {key: example for key, example in pairs if key not in self._states}
            if new:
                before = encoder.num_cut
                states = encoder.encode_examples(list(new.values()))
                if num_cut := encoder.num_cut - before:
                    logger.warning(
                        "%d texts were cut to %d tokens of a prompt", num_cut, encoder.limit
                    )
                self._states.update(zip(new, states, strict=True))
            if not keys:
                return np.empty((0, encoder.width), np.float32)
            return np.array([self._states[key] for key in keys], np.float32)


@dataclass(frozen=True)
class PromptedFit:
    """What was fitted to the states of an encoder: arrays, and other fields."""

    encoder: PromptedEncoder | None
    arrays: Mapping[str, Any]
    fields: Mapping[str, Any]


class PromptedModel(ABC):
    """A public class that is fitted to an LM's prompted states; a folder or the hub keeps the fit.

    The LM is named there, not copied. The constructor takes a `PromptedFit` too.
    """

    @abstractmethod
    def __init__(self, lm: Any) -> None:
        """Take an LM, or what `save` left of a fit to one."""

    @abstractmethod
    def _fitted(self) -> PromptedFit:
        """Return what the constructor takes."""

    def save(self, folder: str | Path) -> None:
        """Write the prompt and what is fitted into a folder; the LM is named, not copied.

        Raises:
            ConfigError: If it ranks pairs, and is opened by its name instead.
            ValueError: If `fit` must be called first.
        """
        fit = self._fitted()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(fit.arrays), folder / FIT_FILE)
        of_lm: dict[str, Any] = {"arguments": {}}
        if fit.encoder is not None:
            arguments = encoder_arguments(fit.encoder)
            arguments["lm"] = without_home(whole_path(arguments["lm"]))
            of_lm = {
                "arguments": arguments,
                "prompt": asdict(fit.encoder.prompt),
                "fingerprint": fit.encoder.fingerprint,
            }
        files = record_files(folder, [FIT_FILE])
        record = {**fit.fields, **of_lm, "class": type(self).__name__, "files": files}
        write_sealed(folder / _RECORD_FILE, record)

    @classmethod
    def load(cls, path: str | Path, *, lm: Any = None, device: str = "auto") -> Self:
        """Open what `save` or `push_to_hub` wrote.

        Args:
            path: Its folder; or on the hub OWNER/NAME, or OWNER/NAME@REVISION.
            lm: Its LM, if loaded already (a `pgra.CausalLM`), or under another name here.
            device: Where the LM runs; a loaded one stays where it is.

        Raises:
            ArtifactError: If there is none, it is damaged, or it was made with another LM.
            ModelError: If the LM cannot be used.
        """
        folder = fetch_folder(cls.__name__.lower(), path)
        record = read_sealed(folder / _RECORD_FILE)
        for file, damage in find_damage(folder, record["files"]):
            raise DamageError(f"{folder / file} {damage}")
        if record["class"] != cls.__name__:
            raise ArtifactError(
                f"{folder} has a {record['class']}: open it by pgra.{record['class']}.load"
            )
        encoder = None
        arguments = record["arguments"]
        if arguments:
            fingerprint = record["fingerprint"]
            if not isinstance(lm, StateLM):
                lm = as_state_lm(
                    lm or str(at_home(arguments["lm"])),
                    device=device,
                    layer=arguments.get("lm_layer", "last"),
                    dtype=fingerprint.get("dtype", "auto"),
                )
            encoder = PromptedEncoder(
                lm,
                msgspec.convert(record["prompt"], FewShotPrompt),
                max_prompt_tokens=arguments["max_prompt_tokens"],
                depths=DEPTHS if "lm_layers" in fingerprint else (),
            )
            check_fingerprint(
                folder,
                made=fingerprint,
                asked=encoder.fingerprint,
                now="the LM that was found has",
                way_out="give its own as lm=",
            )
        return cls(PromptedFit(encoder, load_file(folder / FIT_FILE), record))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None) -> str:
        """Upload what `save` writes, without folders of this machine; return its address.

        `load(repo_id)` opens it. The token is HF_TOKEN, or the login's.

        Args:
            repo_id: OWNER/NAME; a name alone is your own.
            private: Of a new repository; None: as the hub does.

        Raises:
            ConfigError: If the hub refuses token, id or upload; or as of `save`.
        """
        folder = TemporaryFolder().path
        self.save(folder)
        record = read_sealed(folder / _RECORD_FILE)
        record["arguments"] = without_folders(record["arguments"])
        write_sealed(folder / _RECORD_FILE, record)
        return push_folder(folder, folder, repo_id, "fitted to states", private=private)


def encoder_arguments(encoder: PromptedEncoder) -> dict[str, Any]:
    """Return the arguments that open an encoder's LM by its name."""
    lm = encoder.lm
    return {
        **lm.arguments(),
        "max_prompt_tokens": encoder.max_prompt_tokens,
        "chat_template": encoder.chat,
    }


class StateBank(Bank):
    """The bank of an encoder's states, among a run's artifacts."""

    def __init__(
        self,
        encoder: PromptedEncoder,
        fields: Fields,
        context: Context,
        *,
        shard_rows: int,
        suffix: str = "",
    ) -> None:
        """Open it; `fields` are what its states depend on, `suffix` is of its folder's name."""
        self._encoder = encoder
        self._context = context
        self._shard_rows = batch_budget(shard_rows, encoder.lm.device)
        source = encoder.lm.source
        super().__init__(bank_folder(source, context, fields, suffix), fields, inputs=source.inputs)

    def read(
        self, keys: Rows, fields: Callable[[Rows], Sequence[Mapping[str, str]]], title: str
    ) -> int:
        """Let the LM read the texts that are missing, which `fields` returns; return how many."""
        encoder = self._encoder
        return self.compute_missing(
            keys,
            lambda keys: encoder.tokenize(fields(keys)),
            encoder.begin,
            shard_rows=self._shard_rows,
            context=self._context,
            check=lambda prompts, kept: encoder.lm.check_kept(prompts.ids, kept),
            title=title,
        )

    def read_queries(self, examples: Sequence[Example], title: str) -> int:
        """As `read`, of queries by their `query_key`."""
        fields = {query_key(example): example.fields for example in examples}
        keys = np.array(list(fields), np.int64)
        return self.read(keys, lambda keys: [fields[key] for key in keys.tolist()], title)


class BankedReranker(ScoringReranker):
    """Orders a corpus's candidates by their prompted states, which banks on disk keep."""

    reads_lm = True

    def __init__(self, request: RerankRequest, encoder: PromptedEncoder | None = None) -> None:
        """Open the banks of an LM under the task's prompt; `encoder` is one that is open already.

        Raises:
            ConfigError: If the prompt leaves no room for a text, or the similarity cannot be
                fitted.
            ModelError: If the LM cannot be used.
        """
        args = request.args
        if encoder is None:
            depths = DEPTHS if find_similarity(args.similarity).reads_depths else ()
            encoder = PromptedEncoder.open(args, request.prompt, request.context.device, depths)
        self.encoder = encoder
        self.counter = encoder
        self.topic_weight = args.topic_weight or 0.0
        self.corpus = request.corpus
        self.context = request.context
        open_bank = partial(
            StateBank, encoder, context=self.context, shard_rows=args.bank_shard_rows
        )
        fields = {**encoder.fingerprint, **self.corpus.fingerprint}
        self.bank = open_bank(fields)
        self.query_bank = open_bank(encoder.fingerprint, suffix="-queries")  # of all corpora
        self.fitting = Fitting(
            args.similarity,
            request.fit_data,
            encoder,
            num_rows=len(self.corpus),
            bank_fields={**fields, "reranker": "prompted"},
            root=self.context.artifacts / "similarities",
            kind=bank_name(encoder.lm.source.name),
        )
        self.made_from = self.fitting.fingerprint

    def save(self, folder: Path) -> None:
        self.fitting.save(folder)

    def release(self) -> None:
        self.encoder.release()

    def whole_prompt(self, query: Example) -> str:
        return self.encoder.prompt.write(query.fields)

    def compute_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        """Let the LM read queries, candidates and the similarity's sample; fit it."""
        wanted = self._wanted(rows)
        template = self.encoder.prompt.template

        def passages(keys: Rows) -> list[Mapping[str, str]]:
            return [template.passage_fields(text) for text in self.corpus.texts(keys)]

        queries = [*examples, *self.fitting.queries()]
        num_new = self.query_bank.read_queries(queries, "LM reads queries")
        num_new += self.bank.read(wanted, passages, "LM reads passages")
        if not self.context.worker.is_part:  # other parts may have states that it needs
            self.fitting.fit(self.bank, self.query_bank)
        return num_new

    def _wanted(self, rows: Rows) -> Rows:
        return np.union1d(rows[rows != MISSING_ROW], self.fitting.rows())

    def count_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        """Count the queries and passages that the LM has yet to read."""
        queries = query_keys([*examples, *self.fitting.queries()])
        return len(self.query_bank.missing(queries)) + len(self.bank.missing(self._wanted(rows)))

    def score_rows(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Return the similarity's scores of candidates (eq. 3), (B, K), -inf where missing."""
        return score_candidates(
            self.bank,
            rows,
            query_bank=self.query_bank,
            query_keys=query_keys(examples),
            similarity=self.fitting.similarity,
        )
