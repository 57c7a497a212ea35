"""The prompted reranker: an LM reads query and candidates under one prompt.

Guo et al. 2023, section 2.2: states by eq. 2, similarity by eq. 3. The softmax of eq. 3 does not
change the order, so scores are the plain products; others are in `pgra.rerank.similarity`. Each
query has its own prefix in `pgra.rerank.neighbors`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pgra.artifacts import artifact_dir
from pgra.config import Arguments as _Arguments
from pgra.core import MISSING_ROW, Example, Json, Rows, Scores
from pgra.lm.load import batch_budget
from pgra.lm.prefix import PromptedEncoder
from pgra.rerank.bank import Bank, bank_name, query_key
from pgra.rerank.base import (
    BaseReranker,
    RerankArguments,
    RerankRequest,
    ScoringReranker,
)
from pgra.rerank.neighbors import NeighborReranker
from pgra.rerank.similarity import Fitting, find_similarity, score_candidates

Fields = Sequence[Mapping[str, str]]


class PromptedReranker(ScoringReranker):
    """Orders candidates by the similarity of their prompted states to the query's."""

    def __init__(self, request: RerankRequest, encoder: PromptedEncoder) -> None:
        """Open the banks of an LM, a prompt and a corpus.

        Raises:
            ArtifactError: If a bank is damaged.
            ConfigError: If the similarity cannot be fitted.
        """
        args, name = request.args, bank_name(encoder.lm.source.name)
        self.encoder = self.counter = encoder
        self.topic_weight = args.topic_weight
        self.corpus, self.context, self._full = request.corpus, request.context, args.bank == "full"
        self.shard_rows = batch_budget(args.bank_shard_rows, encoder.lm.device)
        made_of = {**encoder.fingerprint, "bank_dtype": "auto"}  # of queries: whatever the corpus
        fields = {**made_of, **self.corpus.fingerprint}
        home, inputs = self.context.artifacts / "banks", encoder.lm.source.inputs
        self.bank = Bank(artifact_dir(home, name, fields), fields, inputs=inputs)
        folder = artifact_dir(home, f"{name}-queries", made_of)
        self.query_bank = Bank(folder, made_of, inputs=inputs)
        self.fitting = Fitting(
            args.similarity,
            encoder,
            request.reference,
            num_rows=len(self.corpus),
            made_of={**self.bank.fingerprint, "reranker": "prompted"},
            home=self.context.artifacts / "similarities" / name,
        )

    @classmethod
    def open(cls, request: RerankRequest) -> BaseReranker:
        """Open an LM under the task's prompt, or each query's own.

        Raises:
            ConfigError: If the prompt leaves no room for a text, the similarity cannot be fitted,
                or exemplars for each query are missing.
            ArtifactError: If a bank is damaged.
            ModelError: If the LM cannot be used.
        """
        args = request.args
        if args.per_query:
            return NeighborReranker(request)
        with_head = find_similarity(args.similarity).reads_words
        encoder = PromptedEncoder.open(
            args, request.prompt, request.context.device, with_head=with_head
        )
        return cls(request, encoder)

    @classmethod
    def models(cls, args: RerankArguments, options: _Arguments | None = None) -> list[str]:  # noqa: ARG003
        return [args.lm]

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return self.with_topic(self.fitting.fingerprint)

    def check(self) -> None:
        """Refuse, with an ArtifactError, an earlier run's fit that is missing."""
        self.fitting.check()

    def release(self) -> None:
        self.encoder.release()

    def whole_prompt(self, query: Example) -> str:
        prompt = self.encoder.prompt
        return prompt.prefix + prompt.suffix(query.fields)

    def fill(self, examples: Sequence[Example], rows: Rows) -> tuple[int, int]:
        """Let the LM read queries, candidates and the similarity's sample; fit it."""
        self.check()
        wanted = self._wanted(rows)
        template = self.encoder.prompt.template
        by_key = {query_key(query): query for query in [*examples, *self.fitting.queries()]}

        def of_queries(keys: Rows) -> Fields:
            return [by_key[key].fields for key in keys.tolist()]

        def of_passages(keys: Rows) -> Fields:
            return [template.passage_fields(text) for text in self.corpus.texts(keys)]

        new = self._fill(self.query_bank, np.array(list(by_key), np.int64), of_queries, "queries")
        new += self._fill(self.bank, wanted, of_passages, "passages")
        self.fitting.fit(self.bank, self.query_bank)
        return len(wanted), new

    def _wanted(self, rows: Rows) -> Rows:
        if self._full:
            return np.arange(len(self.corpus))
        return np.union1d(rows[rows != MISSING_ROW], self.fitting.rows())

    def count_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        """Count the queries and passages that the LM has yet to read."""
        queries = _keys([*examples, *self.fitting.queries()])
        return len(self.query_bank.missing(queries)) + len(self.bank.missing(self._wanted(rows)))

    def _fill(self, bank: Bank, keys: Rows, fields: Callable[[Rows], Fields], title: str) -> int:
        return bank.fill(
            keys,
            lambda keys: self.encoder.tokenize(fields(keys)),
            lambda prompts, advance: self.encoder.begin(prompts, advance=advance),
            shard_rows=self.shard_rows,
            context=self.context,
            title=f"LM reads {title}",
        )

    def score(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Return the similarity's scores of candidates (eq. 3), (B, K), -inf where missing."""
        return score_candidates(
            self.bank,
            rows,
            query_bank=self.query_bank,
            query_keys=_keys(examples),
            similarity=self.fitting.similarity,
        )


def _keys(examples: Sequence[Example]) -> Rows:
    return np.array([query_key(example) for example in examples], np.int64)
