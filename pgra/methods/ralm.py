"""In-context RALM: a causal LM reads the evidence in its prompt (Ram et al. 2023, 2302.00083).

    prompt = evidence passages, then the query under the task's template
    label  = the one whose word's tokens have the largest summed log-probability after the prompt
    answer = what it writes after the prompt, where a task has no labels

As in their figure 2 nothing is trained. Evidence comes from PGRA's stages; with `--num_evidence 0`
there is none.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path

import msgspec

from pgra.arrays import Scores
from pgra.context import Context
from pgra.data.answers import AnsweredExample
from pgra.errors import DamageError, reading
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments, LanguageModel, LMArguments
from pgra.methods.arguments import METHODS
from pgra.methods.base import SPLITS
from pgra.methods.kate import answer_bar, count_word_tokens, score_words, write_answers
from pgra.methods.pgra import Pgra
from pgra.prompts import SEPARATOR, PromptTemplate, Verbalizer, answer_words, fit_prompts
from pgra.reader.calibration import Calibration
from pgra.report.results import EvidenceLine
from pgra.run_folder import TRAINING_FILE, read_object
from pgra.types import Example, Fields, Json


def write_prompt(query: str, evidence: Sequence[str], num_words: int) -> str:
    """Write a prompt with `num_words` of the evidence (best first), shown best last."""
    texts = [query]
    for text in evidence:
        words = text.split()[:num_words]
        num_words -= len(words)
        if words:
            texts.insert(0, " ".join(words))
    return SEPARATOR.join(texts)


def write_prompts(
    lm: LanguageModel,
    names: Sequence[str],
    queries: Sequence[str],
    evidence: Sequence[Sequence[str]],
    *,
    max_tokens: int,
    num_new_tokens: int,
) -> list[str]:
    """Write the prompts of B queries, with as many words of evidence as fit.

    A prompt has `max_tokens` at most, with the `num_new_tokens` of the longest answer.

    Raises:
        ConfigError: If no query has room for a single word.
        DataError: If a query is too long even without evidence; it is named.
    """

    def write(row: int, num_words: int) -> str:
        return write_prompt(queries[row], evidence[row], num_words)

    fit = fit_prompts(
        lm.count_tokens,
        write,
        [sum(len(text.split()) for text in texts) for texts in evidence],
        names=names,
        window=min(max_tokens, lm.window),
        num_new_tokens=num_new_tokens,
        unit="word of evidence",
    )
    return [write(row, count) for row, count in enumerate(fit.counts.tolist())]


def open_reader(name: str, args: LMArguments, context: Context) -> LanguageModel:
    """Open the LM that answers; `args` say how it is run."""
    shared = {field.name: getattr(args, field.name) for field in fields(LMArguments)}
    shared["lm"] = name
    if not name.startswith("http"):
        shared["lm_tokenizer"] = None
    return open_lm(CompleterArguments(**shared), context)


class Ralm(Pgra):
    """Lets a frozen causal LM read evidence and decide, or write."""

    SECTIONS = METHODS["ralm"].sections
    decode = "verbalizer"

    def open_tokenizer(self) -> None:
        """Open the LM, whose weights are loaded when they are needed; its answers are kept."""
        answer_words(self.verbalizer.words)  # refuses ambiguous words
        self.lm = open_reader(self.source.name, self.args.rerank, self.context)
        self.source.inputs.check()  # the LM that the run names is the one that was opened

    @cached_property
    def verbalizer(self) -> Verbalizer:
        """The words that answer, and the query's template."""
        wording = self.data.task.wording("task")
        answer = "" if wording.answer is None else f"\n{wording.answer}"
        return Verbalizer(wording.words, wording.body + answer)

    def identity(self) -> dict[str, Json]:
        return {**super().identity(), "reader_lm": self.lm.fingerprint}

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        """Find the evidence of splits that are read: train never, dev to fit the temperature."""
        unread = ["train"] if self.data.labels or "test" not in splits else ["train", "dev"]
        super().prepare([name for name in splits if name not in unread])

    def new_inputs(
        self, examples: Sequence[Example], lines: Sequence[Sequence[EvidenceLine]]
    ) -> list[str]:
        """Return the LM's prompts."""
        task = self.data.task
        template = PromptTemplate(self.verbalizer.template, "", task.inputs)
        num_new_tokens = task.max_new_tokens
        if self.data.labels:
            num_new_tokens = count_word_tokens(self.lm, self.verbalizer.words)
        return write_prompts(
            self.lm,
            [example.id for example in examples],
            [template.render_query(example.fields, after_prefix=False) for example in examples],
            [[line.text for line in evidence] for evidence in lines],
            max_tokens=self.args["reader"].max_reader_tokens,
            num_new_tokens=num_new_tokens,
        )

    def score(self, inputs: Sequence[str]) -> Scores:
        """Return the log-probability of each label's word after each prompt, (B, C)."""
        return score_words(self.lm, inputs, self.verbalizer.words, self.context)

    def score_answers(
        self, inputs: Sequence[str], questions: Sequence[AnsweredExample]
    ) -> list[float]:
        """Return the log-probability of each question's likeliest right answer, (B,)."""
        best = []
        with answer_bar(inputs, self.context) as bar:
            for prompt, question in zip(inputs, questions, strict=True):
                answers = [f" {answer}" for answer in question.answers]
                best.append(max(self.lm.score([prompt], answers, advance=bar.update)[0]))
        return best

    def write(self, inputs: Sequence[str]) -> list[str]:
        """Return what the LM writes after each prompt, greedily."""
        task = self.data.task
        return write_answers(self.lm, inputs, task.max_new_tokens, task.stop, self.context)

    def fit(self, folder: Path) -> Fields | None:  # noqa: ARG002
        """Fit label bias and temperature on dev; nothing where answers are written."""
        if not self.data.labels:
            return None
        dev = self.calibrate()
        metric = self.data.metric
        value = self.data.measure_dev_scores(self.calibration.apply(dev))[metric]
        return {"metric": metric, "value": value, "calibration": asdict(self.calibration)}

    def score_texts(self) -> Scores:
        """Score the dev texts, of which the labels are not looked at: train is never read."""
        return self.score(self.inputs("dev"))

    def load(self, folder: Path) -> None:
        if not self.data.labels:
            return
        path = folder / TRAINING_FILE
        with reading(path, DamageError):
            self.calibration = msgspec.convert(read_object(path)["calibration"], Calibration)

    def sample_prompt(self) -> str:
        """Return the first test query's prompt, as the reader sees it."""
        return self.new_inputs(self.data.test[:1], self.stages.evidence_lines("test")[:1])[0]

    def restore(self, folder: Path) -> bool:  # noqa: ARG002
        """Return False: there is no reader's folder to open."""
        return False
