"""KATE's nearest examples as the few-shot examples of lm-evaluation-harness (lm-eval 0.4.13).

    python examples/lm_eval_kate.py run --model hf --model_args pretrained=facebook/opt-1.3b \
        --tasks boolq --num_fewshot 8
    lm_eval run ...                               # the same, with its own sampler

The variable ENCODER names another encoder than the bundled one.
"""

import os
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.samplers import SAMPLER_REGISTRY, ContextSampler
from lm_eval.api.task import ConfigurableTask

import pgra

write_context = ConfigurableTask.fewshot_context


class KateSampler(ContextSampler):
    """Takes the documents nearest to the one that is asked, the nearest last."""

    selector = None

    def sample(self, n: int, **_: Any) -> list[Any]:
        docs = self.fewshot_docs()
        if self.selector is None:
            texts = [str(self.task.doc_to_text(doc)) for doc in docs]
            pool = [{"text": text, "label": str(row)} for row, text in enumerate(texts)]
            encoder = os.environ.get("ENCODER", "bundled:minilm-l6")
            self.selector = pgra.ExemplarSelector(pool, encoder=encoder)
        near = self.selector.select(str(self.task.doc_to_text(self.asked)), k=n)
        return [docs[int(item["label"])] for item in reversed(near)]


def fewshot_context(task: Any, doc: Any, num_fewshot: int, **options: Any) -> Any:
    """Tell the sampler which document is asked, and write the prompt."""
    if num_fewshot:
        task.sampler.task = task
        task.sampler.asked = doc
    return write_context(task, doc, num_fewshot, **options)


if __name__ == "__main__":
    SAMPLER_REGISTRY["default"] = KateSampler
    ConfigurableTask.fewshot_context = fewshot_context
    cli_evaluate()
