"""In-context RALM: a causal LM reads the evidence in its prompt (Ram et al. 2023, 2302.00083).

    prompt = evidence passages, then the query under the task's template
    label  = the one whose word's tokens have the largest summed log-probability after the prompt

As in their figure 2 nothing is trained. Evidence comes from PGRA's stages; with `--num_evidence 0`
there is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pgra.core import ALONE, Context, Example, Json, Scores
from pgra.errors import ConfigError
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments, LanguageModel
from pgra.methods.arguments import METHODS, RalmArguments, RunArguments
from pgra.methods.base import SPLITS
from pgra.methods.kate import progress_bar
from pgra.methods.pgra import Pgra
from pgra.prompts import SEPARATOR, PromptTemplate, Verbalizer, answer_words, fit_prompts
from pgra.reader.calibrate import Calibration, decide
from pgra.report.metrics import measure
from pgra.report.results import EvidenceLine, read_object
from pgra.run_folder import TRAINING_FILE


@dataclass(frozen=True)
class LMPrompts:
    """The LM's prompts of B examples."""

    example_ids: Sequence[str]
    labels: Sequence[str | None]
    texts: Sequence[str]


@dataclass(frozen=True)
class EvidenceReader:
    """An LM that reads evidence and query, and scores each label's word.

    `words` are in the task's order of labels; `template` shows the query.
    """

    lm: LanguageModel
    template: PromptTemplate
    words: Mapping[str, str]
    args: RalmArguments

    def write(self, fields: Mapping[str, str], evidence: Sequence[str], num_words: int) -> str:
        """Write a prompt with `num_words` of the evidence (best first), shown best last."""
        shown = []
        for text in evidence:
            words = text.split()[:num_words]
            num_words -= len(words)
            shown += [" ".join(words)] if words else []
        query = self.template.render_query(fields, after_prefix=False)
        return SEPARATOR.join([*reversed(shown), query])

    def prompts(self, examples: Sequence[Example], evidence: Sequence[Sequence[str]]) -> LMPrompts:
        """Write the prompts of B examples, with as many words of evidence as fit.

        Raises:
            ConfigError: If no example has room for a single word.
            DataError: If a query is too long even without evidence.
        """
        ids = [example.id for example in examples]
        opening, *lengths = self.lm.count_tokens(["", *answer_words(self.words)])

        def write(row: int, num_words: int) -> list[str]:
            return [self.write(examples[row].fields, evidence[row], num_words)]

        fit = fit_prompts(
            self.lm.count_tokens,
            write,
            [sum(len(text.split()) for text in texts) for texts in evidence],
            names=ids,
            window=min(self.args.max_reader_tokens, self.lm.window),
            num_new_tokens=max(lengths) - opening,
            unit="word of evidence",
        )
        texts = [write(row, count)[0] for row, count in enumerate(fit.counts.tolist())]
        return LMPrompts(ids, [example.label for example in examples], texts)

    def score(self, prompts: LMPrompts, context: Context = ALONE) -> Scores:
        """Return the log-probability of each label's word after each prompt, (B, C)."""
        with progress_bar(prompts.texts, progress=context.shows_progress) as advance:
            scores = self.lm.score(prompts.texts, answer_words(self.words), advance=advance)
        return np.array(scores, np.float32).reshape(len(prompts.texts), len(self.words))


class Ralm(Pgra):
    """Lets a frozen causal LM read evidence and decide."""

    SECTIONS = METHODS["ralm"].sections
    decode = "verbalizer"

    @classmethod
    def name(cls, args: RunArguments) -> str:
        return args.runtime.method

    def open(self) -> None:
        if self.pgra.retriever.neighbor_encoder == "reader":
            raise ConfigError(
                "neighbor_encoder 'reader' is a T5's encoder, and method 'ralm' has a causal LM: "
                "leave it out"
            )
        super().open()

    def open_tokenizer(self) -> None:
        """Open the LM, whose weights are loaded when they are needed; its answers are kept."""
        rerank, words = self.pgra.rerank, self.verbalizer.words
        answer_words(words)  # refuses ambiguous words
        asked = CompleterArguments(
            lm=self.source.name,
            lm_dtype=rerank.lm_dtype,
            lm_device_map=rerank.lm_device_map,
            lm_batch_tokens=rerank.lm_batch_tokens,
        )
        template = PromptTemplate(self.verbalizer.template, "", self.data.task.inputs)
        self.reader = EvidenceReader(
            open_lm(asked, self.context), template, words, self.args["reader"]
        )

    @cached_property
    def verbalizer(self) -> Verbalizer:
        """The words that answer, and the query's template."""
        task = self.data.choice
        return Verbalizer(task.prompt_words, f"{task.prompt}\n{task.answer}")

    def identity(self) -> dict[str, Json]:
        return {**super().identity(), "reader_lm": self.reader.lm.fingerprint}

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        """Find the evidence of splits, but for train, which is not read."""
        super().prepare([name for name in splits if name != "train"])

    def inputs(self, split: str) -> LMPrompts:  # type: ignore[override]  # another kind
        return self.new_inputs(self.data.examples(split), self.stages.evidence_lines(split))

    def new_inputs(
        self, examples: Sequence[Example], lines: Sequence[Sequence[EvidenceLine]]
    ) -> LMPrompts:
        texts = [[line.text for line in found] for found in lines]
        prompts: LMPrompts = self.reader.prompts(examples, texts)
        return prompts

    def fit(self, folder: Path) -> Mapping[str, Json]:  # noqa: ARG002
        """Fit the temperature on the dev set."""
        scores, dev = self.fit_temperature(self.context), self.data.examples("dev")
        labels, metric = self.data.labels, self.data.metric
        decided = [p.label for p in decide([e.id for e in dev], scores, labels)]
        value = measure(metric, [str(e.label) for e in dev], decided, labels)[metric]
        return {"metric": metric, "value": value, "calibration": asdict(self.calibration)}

    def load(self, folder: Path) -> None:
        self.calibration = Calibration(**read_object(folder / TRAINING_FILE)["calibration"])

    def sample_prompt(self) -> str:
        """Return the first test query's prompt, as the reader sees it."""
        lines = self.stages.evidence_lines("test")[:1]
        return self.new_inputs(self.data.test[:1], lines).texts[0]

    @classmethod
    def restore(cls, folder: Path, args: RunArguments, context: Context) -> None:  # noqa: ARG003
        """Return None: there is no reader's folder to open."""
        return
