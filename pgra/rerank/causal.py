"""A causal LM that was trained to answer whether a passage is relevant: Qwen3-Reranker and others.

    score(query, passage) = logit("yes") - logit("no")      after the model's own template

as the models' cards and sentence-transformers' `LogitScore` have it; of a model with one word, that
word's logit.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pgra.errors import ConfigError, ModelError
from pgra.rerank.arguments import CausalRerankerArguments
from pgra.rerank.base import ScorerRequest
from pgra.rerank.pairs import PairReranker
from pgra.types import Fields

_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {passage}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n<|im_start|>user\nquery: {query}\ndocument: {passage}\nYou are a search relevance "
    "expert who evaluates how well documents match search queries. For each query-document pair, "
    "carefully analyze the semantic relationship between them, then provide your binary relevance "
    "judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
)
_BGE = (
    "<bos>A: {query}\nB: {passage}\nGiven a query A and a passage B, determine whether the passage "
    "contains an answer to the query by providing a prediction of either 'Yes' or 'No'."
)
# By a part of the model's name: the published template, and the words that count for and against.
TEMPLATES = {
    "qwen3-reranker": (_QWEN3, ["yes", "no"]),
    "mxbai-rerank": (_MXBAI, ["1", "0"]),
    "bge-reranker-v2-gemma": (_BGE, ["Yes"]),
}


class CausalReranker(PairReranker):
    """Orders candidates by what a causal LM answers; the passage of a long pair is cut."""

    options_class = CausalRerankerArguments
    model_class = "AutoModelForCausalLM"
    add_special_tokens = False  # the template has them

    def __init__(self, request: ScorerRequest) -> None:
        """Open the model, without its weights; errors as `PairReranker`'s."""
        options = request.options
        assert isinstance(options, CausalRerankerArguments)
        self.template, words = _template(options)
        super().__init__(request)
        ids = [self.call_tokenizer([word])[0]["input_ids"] for word in words]
        if any(len(tokens) != 1 for tokens in ids):
            raise ModelError(
                f"'{self.source.name}' has several tokens for a word: give other --causal_words"
            )
        self.answers = [tokens[0] for tokens in ids]

    def fields(self) -> Fields:
        return {**super().fields(), "reranker": "causal"}

    def text(self, query: str, passage: str) -> str:
        sides = self.template.split("{query}")  # so that neither text is searched
        return query.join(side.replace("{passage}", passage) for side in sides)

    def score_batch(self, batch: Mapping[str, Tensor]) -> Tensor:
        ends = batch["attention_mask"].sum(dim=1) - 1
        columns, places = torch.unique(ends, return_inverse=True)
        logits = self.model(**batch, logits_to_keep=columns).logits.float()
        lines = torch.arange(len(ends), device=ends.device)
        words: Tensor = logits[lines, places][:, self.answers]
        return words[:, 0] - words[:, 1] if len(self.answers) > 1 else words[:, 0]


def _template(options: CausalRerankerArguments) -> tuple[str, list[str]]:
    name = Path(options.causal_reranker).name.lower()  # not the folders above it
    published = [entry for key, entry in TEMPLATES.items() if key in name]
    template, words = published[0] if published else (options.causal_template, ["yes", "no"])
    if template is None:
        raise ConfigError(
            f"'{options.causal_reranker}' is not one of {', '.join(TEMPLATES)}: give "
            "--causal_template"
        )
    return options.causal_template or template, list(options.causal_words or words)
