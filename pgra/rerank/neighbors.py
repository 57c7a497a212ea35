"""The prompted reranker with a prefix of its own for every query: KATE inside PGRA.

A query and its candidates are read under the query's nearest training examples (Liu et al. 2022,
section 2.3) and compared as in Guo et al. 2023, eq. 3. A passage then has another state for every
query, so no states are kept, but each pair's dot product and cosine (`pgra.rerank.pairs`); k + 1
texts are read a query, and its prefix once.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.core import Example, Json, Rows
from pgra.lm.prefix import PromptedEncoder, TokenizedPrompts
from pgra.rerank.bank import Advance
from pgra.rerank.base import RerankRequest
from pgra.rerank.pairs import PairBankReranker, Pairs

KEPT = ("dot", "cosine")  # the columns of a pair's entry in the bank


# A query's encoder, its prompt and its candidates', and their indices in the shard.
Unit = tuple[PromptedEncoder, TokenizedPrompts, npt.NDArray[np.intp]]


class NeighborReranker(PairBankReranker):
    """Orders candidates by the similarity of states under the query's own exemplars.

    `encoder` is the LM without exemplars; `similarity` is "dot" (the paper) or "cosine" (its code).
    """

    reads_queries = True

    def __init__(self, request: RerankRequest) -> None:
        """Open an LM, and the bank of LM, template and corpus; errors as `Reranker.open`'s."""
        args, exemplars = request.args, request.exemplars
        assert exemplars is not None  # `exemplars` says so
        encoder = PromptedEncoder.open(args, exemplars.prompt(()), request.context.device)
        fields = {**encoder.fingerprint, "kept of a pair": list(KEPT)}
        super().__init__(request, encoder.lm.source, fields)
        self.encoder = self.counter = encoder
        self.exemplars, self.similarity = exemplars, args.similarity
        self.column = KEPT.index(args.similarity)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return self.with_topic(
            {
                **self.bank.fingerprint,
                **self.exemplars.fingerprint,
                "reranker": "prompted",
                "similarity": self.similarity,
            }
        )

    def release(self) -> None:
        self.encoder.release()

    def whole_prompt(self, query: Example) -> str:
        """Return the query's prompt as it is read, where not all exemplars fit."""
        prompt = self.exemplars.encoder_for(self.encoder, query).prompt
        return prompt.prefix + prompt.suffix(query.fields)

    def pairs(self, examples: Sequence[Example], rows: Rows) -> Pairs:
        self.exemplars.look_up(examples, self.context)
        return super().pairs(examples, rows)

    def identify(self, example: Example) -> Mapping[str, Json]:
        prefix = self.exemplars.prompt(self.exemplars.of(example)).prefix
        return {"prefix": prefix, "fields": dict(example.fields)}

    def fill(self, examples: Sequence[Example], rows: Rows) -> tuple[int, int]:
        counts = super().fill(examples, rows)
        self.exemplars.warn_shortened()
        return counts

    def read(self, pairs: Pairs, keys: Rows) -> deque[Unit]:
        """Write and tokenise a shard's prompts, query by query."""
        at = pairs.find(keys)
        queries = pairs.queries[at]
        units: deque[Unit] = deque()
        for query in np.unique(queries):
            example, mine = pairs.examples[query], np.flatnonzero(queries == query)
            encoder = self.exemplars.encoder_for(self.encoder, example)
            template = encoder.prompt.template
            texts = self.corpus.texts(pairs.rows[at[mine]])
            fields = [example.fields, *(template.passage_fields(text) for text in texts)]
            _ = encoder.shared_ids  # here, not while the next shard is with the tokeniser
            units.append((encoder, encoder.tokenize(fields), mine))
        return units

    def compute(self, shard: deque[Unit], advance: Advance) -> Tensor:
        """Read a shard's queries, each under its own prefix: (n, 2) float32, columns as `KEPT`."""
        found = torch.empty(sum(len(indices) for _, _, indices in shard), len(KEPT))
        while shard:  # a prefix's keys and values are gone with its query
            encoder, prompts, indices = shard.popleft()
            states = encoder.encode_prompts(prompts).float()  # (1 + n, H)
            query, passages = states[0], states[1:]
            dot = (passages * query).sum(1)
            lengths = torch.linalg.vector_norm(states, dim=1)
            found[indices] = torch.stack([dot, dot / (lengths[1:] * lengths[0])], dim=1)
            self.encoder.num_tokens += encoder.num_tokens
            self.encoder.num_cut += encoder.num_cut
            advance(len(passages))
        return found
