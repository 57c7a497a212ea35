"""Orders passages by how likely a causal LM finds the query after each: for facts and questions.

    score(query, passage) = mean_t log P(query_t | passage, query_<t)

Sachan et al. 2022, "Improving Passage Retrieval with Zero-Shot Question Generation" (UPR), eq. 2.
A passage is read once for all queries of a shard that have it as a candidate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pgra.arrays import Rows
from pgra.errors import ConfigError
from pgra.lm import open_state_lm
from pgra.rerank.arguments import LikelihoodArguments
from pgra.rerank.bank import Advance
from pgra.rerank.base import ScorerRequest
from pgra.rerank.pairs import PairBankReranker, Pairs


@dataclass(frozen=True)
class PassagePrompts:
    """A shard's distinct prompts, of passages, as token ids, and after each its queries'.

    `indices` are those of these queries' pairs in the shard.
    """

    prompts: Sequence[list[int]]
    queries: Sequence[Sequence[list[int]]]
    indices: Sequence[Sequence[int]]


class LikelihoodReranker(PairBankReranker):
    """Orders candidates by the mean log-probability of the query's tokens after the passage."""

    options_class = LikelihoodArguments
    reads_lm = True
    reads_prompt = False
    reads_passages = True
    topic_weight = 1.0

    def __init__(self, request: ScorerRequest) -> None:
        """Open an LM, without its weights, and the bank of its scores.

        Raises:
            ArtifactError: If the bank is damaged.
            ModelError: If the LM cannot be used.
        """
        options = request.options
        assert isinstance(options, LikelihoodArguments)
        self._before, rest = options.likelihood_template.split("{passage}")
        self._between = rest.rstrip().removesuffix("{query}").rstrip()
        args = replace(request.args, lm_layer="last")  # scores are of the last layer
        self.lm = open_state_lm(args, device=request.context.device)
        self.limit = min(request.args.max_prompt_tokens or self.lm.window, self.lm.window)
        fields = {
            **self.lm.fingerprint,
            "reranker": "likelihood",
            "template": options.likelihood_template,
            "max_prompt_tokens": self.limit,
            "cut": "by pair",
        }
        super().__init__(request, self.lm.source, fields)

    def release(self) -> None:
        self.lm.release()

    def read(self, pairs: Pairs, keys: Rows) -> PassagePrompts:
        """Tokenise a shard's passages, and the queries after each.

        A long passage loses its end, until its prompt has room for the pair's own query.
        """
        at = pairs.find(keys)
        texts = [pairs.examples[query].text for query in pairs.queries[at]]
        queries = self.lm.tokenize([f" {text}" for text in texts])
        owners: dict[int, list[int]] = {}
        for number, row in enumerate(pairs.rows[at].tolist()):
            owners.setdefault(row, []).append(number)
        begun = [f"{self._before}{text}" for text in pairs.texts(np.array(list(owners)))]
        whole = self.lm.tokenize([f"{text}{self._between}" for text in begun])
        lead = self.lm.lead_ids
        between = self.lm.tokenize([self._between])[0]
        prompts = list[list[int]]()
        indices = list[list[int]]()
        for text, ids, numbers in zip(begun, whole, owners.values(), strict=True):
            by_length: dict[int, list[int]] = {}  # of the passage
            for number in numbers:
                room = self.limit - len(lead) - len(queries[number])
                if not queries[number] or room <= len(between):
                    raise ConfigError(
                        f"the query '{texts[number][:80]}' has {len(queries[number])} tokens: it "
                        f"needs one, and room for a passage in the {self.limit} that the LM reads: "
                        "use another query, a longer window, or more --max_prompt_tokens"
                    )
                by_length.setdefault(min(room, len(ids)), []).append(number)
            for length, numbers in by_length.items():
                prompt = ids
                if length < len(ids):
                    self.num_cut += 1
                    beginning = self.lm.tokenize([text])[0]
                    prompt = [*beginning[: length - len(between)], *between]
                prompts.append([*lead, *prompt])
                indices.append(numbers)
        after = [[queries[number] for number in numbers] for numbers in indices]
        return PassagePrompts(prompts, after, indices)

    def compute(self, shard: PassagePrompts, advance: Advance) -> Callable[[], Tensor]:
        """Score a shard's pairs; return a function of the scores, (n, 1) float32."""
        totals = self.lm.scores(shard.prompts, shard.queries, advance=advance)
        scores = torch.empty(sum(map(len, shard.indices)), 1)
        for indices, queries, sums in zip(shard.indices, shard.queries, totals, strict=True):
            for index, query, total in zip(indices, queries, sums, strict=True):
                scores[index] = total / len(query)
        return lambda: scores
