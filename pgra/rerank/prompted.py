"""The prompted reranker: an LM reads query and candidates under one prompt, or several.

Guo et al. 2023, section 2.2: states by eq. 2, similarity by eq. 3. The softmax of eq. 3 does not
change the order, so scores are the plain products; other ways are in `pgra.rerank.similarity`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from torch import Tensor

from pgra.artifacts import artifact_dir
from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Example, Json, Rows, Scores
from pgra.data.corpus import Corpus
from pgra.lm.load import dtype_name
from pgra.lm.prefix import PromptedEncoder, Prompts
from pgra.rerank.bank import Advance, Bank, query_key
from pgra.rerank.base import Work
from pgra.rerank.similarity import Fitting, Reference, score_candidates

logger = logging.getLogger(__name__)


class PromptedReranker:
    """Orders candidates by the likeness of their prompted states to the query's.

    Attributes:
        encoder: Gives the states.
        fitting: Gives the similarity, and fits it where it needs that.
        shard_rows: Texts in one shard of a bank.
    """

    def __init__(
        self,
        encoder: PromptedEncoder,
        corpus: Corpus,
        artifacts: Path,
        *,
        similarity: str = "dot",
        shard_rows: int = 512,
        name: str = "bank",
        full: bool = False,
        bank_dtype: str = "auto",
        reference: Reference = Reference(),  # noqa: B008 (frozen)
    ) -> None:
        """Open the banks of an LM, a prompt and a corpus.

        Args:
            encoder: Gives the states.
            corpus: What rows stand for.
            artifacts: Root of all products.
            similarity: A name of `pgra.rerank.similarity.WAYS`.
            shard_rows: Texts in one shard of a bank.
            name: How the banks' folders begin.
            full: Whether `prepare` reads the whole corpus, not only the candidates.
            bank_dtype: How passages' states are kept: "auto" (as they come), "float16" or "int8".
                Queries' always stay as they come: they are few.
            reference: What the task gives a similarity that is fitted.

        Raises:
            ArtifactError: If a bank is damaged.
            ConfigError: If the similarity cannot be fitted.
        """
        self.encoder, self.corpus = encoder, corpus
        self.shard_rows, self._full = shard_rows, full
        as_they_come = bank_dtype in ("auto", dtype_name(encoder.lm.dtype))
        dtype = "auto" if as_they_come else bank_dtype
        fields = {**encoder.fingerprint, **corpus.fingerprint, "bank_dtype": dtype}
        self.bank = _open_bank(artifacts, name, fields, dtype=dtype)
        self.query_bank = open_query_bank(encoder, artifacts, name)
        self.fitting = Fitting(
            similarity,
            encoder,
            reference,
            num_rows=len(corpus),
            made_of={**self.bank.fingerprint, "reranker": "prompted"},
            home=artifacts / "similarities" / name,
        )

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that the order of candidates depends on, besides the candidates."""
        return self.fitting.fingerprint

    def wanted(self, rows: Rows) -> Rows:
        """Give the passages to read for candidates: also those that the similarity is fitted to."""
        if self._full:
            return np.arange(len(self.corpus))
        return np.union1d(rows[rows != MISSING_ROW], self.fitting.rows())

    def prepare(
        self,
        examples: Sequence[Example],
        rows: Rows,
        *,
        context: Context = ALONE,
        progress: bool = False,
    ) -> Work:
        """Let the LM read the queries and passages that it has not read yet; fit the similarity.

        Args:
            examples: The queries, of all splits at once.
            rows: Their candidates, any shape; missing ones are passed over.
            context: Who shares the work.
            progress: Whether to show a bar.

        Raises:
            ArtifactError: If the similarity was fitted by an earlier run, and that is missing.
        """
        self.fitting.check()
        start, tokens, cut = time.perf_counter(), self.encoder.num_tokens, self.encoder.num_cut
        wanted = self.wanted(rows)
        logger.info(
            "reranker: %d distinct passages of %d in the corpus, %d for the LM to read",
            len(wanted),
            len(self.corpus),
            len(self.bank.missing(wanted)),
        )
        new = fill_queries(
            self.query_bank,
            self.encoder,
            [*examples, *self.fitting.queries()],
            shard_rows=self.shard_rows,
            context=context,
            progress=progress,
        )
        new += self._fill_passages(wanted, context, progress=progress)
        self.fitting.fit(self.bank, self.query_bank)
        return Work(
            len(wanted),
            new,
            self.encoder.num_tokens - tokens,
            self.encoder.num_cut - cut,
            time.perf_counter() - start,
        )

    def _fill_passages(self, rows: Rows, context: Context, *, progress: bool) -> int:
        template = self.encoder.prompt.template

        def read(keys: Rows) -> Prompts:
            texts = self.corpus.texts(keys)
            return self.encoder.tokenize([template.passage_fields(text) for text in texts])

        return self.bank.fill(
            rows,
            read,
            self._encode,
            shard_rows=self.shard_rows,
            context=context,
            progress=progress,
            title="LM reads passages",
        )

    def _encode(self, prompts: Prompts, advance: Advance) -> Tensor:
        return self.encoder.encode_prompts(prompts, advance=advance)

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Order each query's candidates by eq. 3; `prepare` must have seen them.

        Args:
            examples: B queries.
            candidates: (B, K).

        Returns:
            The same rows (B, K) with the similarity's scores, best first, ties by row.

        Raises:
            KeyError: If a state is missing.
        """
        scores = self.score(examples, candidates.rows)
        return Candidates.best(candidates.rows, scores, candidates.rows.shape[1])

    def score(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Give the similarity's scores of candidates, (B, K), -inf where a row is missing.

        Raises:
            KeyError: If a state is missing.
        """
        keys = np.array([query_key(example) for example in examples], np.int64)
        return score_candidates(
            self.bank,
            rows,
            query_bank=self.query_bank,
            query_keys=keys,
            similarity=self.fitting.similarity,
        )


def open_query_bank(
    encoder: PromptedEncoder,
    artifacts: Path,
    name: str,
    made_of: Mapping[str, Json] = MappingProxyType({}),
) -> Bank:
    """Open the bank of an LM's states of queries, whatever the corpus.

    Args:
        encoder: Gives the states.
        artifacts: Root of all products.
        name: How the folders of the LM's banks begin.
        made_of: What else a query's prompt depends on, besides its fields.

    Raises:
        ArtifactError: If it is damaged.
    """
    fields = {**encoder.fingerprint, **made_of, "bank_dtype": "auto"}
    return _open_bank(artifacts, f"{name}-queries", fields)


def fill_queries(
    bank: Bank,
    encoder: PromptedEncoder,
    examples: Sequence[Example],
    *,
    shard_rows: int,
    written: Sequence[int] = (),
    tokenize: Callable[[Sequence[Example]], Prompts] | None = None,
    context: Context = ALONE,
    progress: bool = False,
) -> int:
    """Let the LM read the queries that it has not read yet.

    Args:
        bank: As `open_query_bank` gives it.
        encoder: Gives the states.
        examples: The queries; equal ones are read once.
        shard_rows: Texts in one shard.
        written: Token ids that follow each prompt.
        tokenize: Writes the queries' prompts; None has the encoder's prefix before each.
        context: Who shares the work.
        progress: Whether to show a bar.

    Returns:
        How many were read.

    Raises:
        ConfigError: If a prompt with what follows it is longer than the LM's window.
    """
    by_key = {query_key(example, written): example for example in examples}

    def read(keys: Rows) -> Prompts:
        asked = [by_key[int(key)] for key in keys]
        if tokenize is None:
            prompts = encoder.tokenize([example.fields for example in asked])
        else:
            prompts = tokenize(asked)
        return encoder.continued(prompts, written) if written else prompts

    return bank.fill(
        np.array(list(by_key), np.int64),
        read,
        lambda prompts, advance: encoder.encode_prompts(prompts, advance=advance),
        shard_rows=shard_rows,
        context=context,
        progress=progress,
        title="LM reads queries",
    )


def _open_bank(
    artifacts: Path, name: str, fingerprint: Mapping[str, Json], *, dtype: str = "auto"
) -> Bank:
    folder = artifact_dir(artifacts / "banks", name, fingerprint)
    return Bank(folder, fingerprint, dtype=dtype)


# One LM under several prefixes: a candidate's score is the mean over them.
#
# What an LM makes of few shots depends much on which shots they are (Lu et al. 2022,
# "Fantastically Ordered Prompts"). Each draw of exemplars has banks of its own, so that the LM
# reads all texts once a prefix; products of one prefix are computed as `PromptedReranker` does,
# and averaged.


class AveragedReranker:
    """Orders candidates by the mean of their scores under several prefixes.

    Attributes:
        members: One reranker a prefix, of the same LM.
    """

    def __init__(self, members: Sequence[PromptedReranker]) -> None:
        self.members = list(members)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that the order of candidates depends on, besides the candidates."""
        return {"prefixes": [dict(member.fingerprint) for member in self.members]}

    def prepare(
        self,
        examples: Sequence[Example],
        rows: Rows,
        *,
        context: Context = ALONE,
        progress: bool = False,
    ) -> Work:
        """Let the LM read queries and passages under each prefix, as far as it has not yet.

        Args:
            examples: The queries, of all splits at once.
            rows: Their candidates, any shape; missing ones are passed over.
            context: Who shares the work.
            progress: Whether to show bars.

        Returns:
            Sums over prefixes; passages are counted once.
        """
        done = [
            member.prepare(examples, rows, context=context, progress=progress)
            for member in self.members
        ]
        return Work(
            done[0].num_passages,
            sum(work.num_new for work in done),
            sum(work.num_tokens for work in done),
            sum(work.num_cut for work in done),
            sum(work.seconds for work in done),
        )

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Order each query's candidates by the mean score; `prepare` must have seen them.

        Args:
            examples: B queries.
            candidates: (B, K).

        Returns:
            The same rows (B, K) with the means, best first, ties by row.

        Raises:
            KeyError: If a state is missing.
        """
        rows = candidates.rows
        scores = np.mean([member.score(examples, rows) for member in self.members], axis=0)
        return Candidates.best(rows, scores, rows.shape[1])
