"""In-context RALM: a causal LM reads the evidence in its prompt (Ram et al. 2023, 2302.00083).

    prompt = evidence passages, then the query under the task's template
    label  = the one whose word's tokens have the largest summed log-probability after the prompt

Ram et al. leave the LM as it is and prepend what a retriever found (their figure 2); so does this
method without `--lora_rank`: then nothing is trained. With it, adapters are trained on the labels'
words (Hu et al. 2022), and the finished reader is a plain LM again, asked in the same way. Evidence
comes from PGRA's stages; with `--num_evidence 0` there is none. REPLUG (Shi et al. 2023) reads each
passage in a prompt of its own and averages; that is not done here.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pgra.core import ALONE, Context, Example, Json, Scores, gather
from pgra.errors import ConfigError
from pgra.lm.base import CompleterArguments, LanguageModel, open_lm
from pgra.lm.batching import BackOff, send, token_budget_batches
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import batch_budget
from pgra.methods.answers import progress_bar
from pgra.methods.arguments import SECTIONS, RalmArguments, RunArguments
from pgra.methods.base import SPLITS
from pgra.methods.pgra import Pgra
from pgra.prompts.fewshot import answer_words
from pgra.prompts.fitting import fit_prompts
from pgra.prompts.template import SEPARATOR, PromptTemplate
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.calibrate import Calibration, decide
from pgra.reader.causal import CausalModule, answer_row, pad
from pgra.reader.inputs import SegmentLayout
from pgra.reader.module import Classifier
from pgra.reader.predict import Decision
from pgra.reader.record import READER_FOLDER, RECORD_FILE
from pgra.report.metrics import measure
from pgra.report.results import EvidenceLine, read_object
from pgra.run_folder import TRAINING_FILE


@dataclass(frozen=True)
class Prompts:
    """What the LM is asked about B examples.

    Attributes:
        example_ids: One a row.
        labels: None where an example has none.
        texts: The prompts.
    """

    example_ids: Sequence[str]
    labels: Sequence[str | None]
    texts: Sequence[str]

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.texts)

    def __getitem__(self, row: int) -> tuple[str, str, str | None]:
        """Return an example's id, prompt and label."""
        return self.example_ids[row], self.texts[row], self.labels[row]


@dataclass(frozen=True)
class PromptReader:
    """An LM that reads evidence and query, and says how likely each label's word is.

    Attributes:
        lm: The LM.
        template: How a query is shown.
        words: Word by label, in the task's order of labels.
        args: How evidence is shown.
    """

    lm: LanguageModel
    template: PromptTemplate
    words: Mapping[str, str]
    args: RalmArguments

    def write(self, fields: Mapping[str, str], evidence: Sequence[str], num_words: int) -> str:
        """Write a prompt with the first words of the evidence, which is best first."""
        shown = []
        for text in evidence:
            words = text.split()[:num_words]
            num_words -= len(words)
            shown += [" ".join(words)] if words else []
        if self.args.evidence_order == "best_last":
            shown.reverse()
        return SEPARATOR.join([*shown, self.template.render_query(fields, after_prefix=False)])

    def prompts(self, examples: Sequence[Example], evidence: Sequence[Sequence[str]]) -> Prompts:
        """Write the prompts of B examples, with as many words of evidence as there is room for.

        Raises:
            ConfigError: If no example has room for a single word.
            DataError: If a query is too long even without evidence; it is named.
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
        return Prompts(ids, [example.label for example in examples], texts)

    def score(self, prompts: Prompts, context: Context = ALONE) -> Scores:
        """Return the log-probability of each label's word after each prompt, (B, C)."""
        with progress_bar(prompts.texts, progress=context.shows_progress) as advance:
            scores = self.lm.score(prompts.texts, answer_words(self.words), advance=advance)
        return np.array(scores, np.float32).reshape(len(prompts), len(self.words))


class Ralm(Pgra):
    """Lets a causal LM read evidence and decide, as it is or with adapters that were trained."""

    SECTIONS = SECTIONS["ralm"]
    SEEDS = "seeds of the adapters and the order of examples; without adapters of no effect"
    MODELS = AutoModelForCausalLM

    @classmethod
    def name(cls, args: RunArguments) -> str:
        """Return ralm, or ralm-lora."""
        return "ralm-lora" if args.trains else "ralm"

    def open(self) -> None:
        """Read task and models' names, and refuse what cannot work."""
        if self.pgra.retriever.neighbor_encoder == "reader":
            raise ConfigError(
                "neighbor_encoder 'reader' is a T5's encoder, and method 'ralm' has a causal LM: "
                "leave it out"
            )
        super().open()

    def open_tokenizer(self) -> None:
        """Open the LM, whose weights are loaded when they are needed, behind its prompts."""
        self.reader = self._open_reader(self.source.name)
        answer_words(self.verbalizer.words)  # refuses words that cannot be told apart

    @cached_property
    def verbalizer(self) -> Verbalizer:
        """The words that answer, and how the LM sees a query."""
        task = self.data.choice
        return Verbalizer(task.prompt_words, f"{task.prompt}\n{task.answer}")

    @cached_property
    def layout(self) -> SegmentLayout:
        """What the reader's record says of its prompts."""
        most: int = self.args["reader"].max_reader_tokens
        return SegmentLayout(self.verbalizer.template, "evidence_first", most)

    @property
    def decision(self) -> Decision:
        """How labels are decided."""
        return Decision()

    @property
    def attends(self) -> bool:
        """Whether it says what the reader looked at."""
        return False

    def _open_reader(self, name: str, *, is_trained: bool = False) -> PromptReader:
        """Open the LM that reads, whose answers are kept; one that was trained here in float32."""
        rerank = self.pgra.rerank
        asked = CompleterArguments(
            lm=name,
            lm_dtype="float32" if is_trained else rerank.lm_dtype,
            lm_quantization="none" if is_trained else rerank.lm_quantization,
            lm_device_map=rerank.lm_device_map,
            lm_batch_tokens=rerank.lm_batch_tokens,
        )
        template = PromptTemplate(self.verbalizer.template, "", self.data.task.inputs)
        lm = open_lm(asked, self.context)
        return PromptReader(lm, template, self.verbalizer.words, self.args["reader"])

    def identity(self) -> dict[str, Json]:
        """Return what decides the weights and predictions, besides the examples."""
        named = super().identity()
        return named if self.args.trains else {**named, "reader_lm": self.reader.lm.fingerprint}

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        """Find the evidence of splits; nobody reads train's where nothing is trained."""
        super().prepare([name for name in splits if self.args.trains or name != "train"])

    def inputs(self, split: str) -> Prompts:  # type: ignore[override]  # another kind
        """Write the prompts of a split."""
        return self.new_inputs(self.data.examples(split), self.stages.evidence_lines(split))

    def new_inputs(
        self, examples: Sequence[Example], lines: Sequence[Sequence[EvidenceLine]]
    ) -> Prompts:
        """Write the prompts of any examples with their evidence."""
        texts = [[line.text for line in found] for found in lines]
        prompts: Prompts = self.reader.prompts(examples, texts)
        return prompts

    def fit(self, folder: Path) -> Mapping[str, Json]:
        """Train adapters if they are asked for, and fit the temperature on the dev set."""
        if self.args.trains:
            return super().fit(folder)
        scores, dev = self.fit_temperature(self.context), self.data.examples("dev")
        labels, metric = self.data.labels, self.data.metric
        decided = [p.label for p in decide([e.id for e in dev], scores, labels)]
        value = measure(metric, [str(e.label) for e in dev], decided, labels)[metric]
        return {"metric": metric, "value": value, "calibration": asdict(self.calibration)}

    def begin(self) -> "LMClassifier":
        """Return the LM that training starts from."""
        asked: RalmArguments = self.args["reader"]
        module = CausalModule.from_name(asked.reader_lm)
        module.add_adapters(asked, seed=self.seed)
        lm = CausalLM.from_name(asked.reader_lm, device="cpu")  # its tokens alone are used
        return LMClassifier(module, lm.tokenizer, lm, self.verbalizer.words)

    def end(self, folder: Path) -> None:
        """Let go of what was trained, and open what was written."""
        del self.reader
        gc.collect()  # the Trainer's circles
        self.open_trained(folder / READER_FOLDER)

    def open_trained(self, home: Path) -> None:
        """Open a trained reader by its folder."""
        self.reader = self._open_reader(str(home), is_trained=True)

    def load(self, folder: Path) -> None:
        """Load the trained reader, or take up the temperature of one that was not trained."""
        if self.args.trains:
            super().load(folder)
        else:
            self.calibration = Calibration(**read_object(folder / TRAINING_FILE)["calibration"])

    def sample_prompt(self) -> str:
        """Return the first test query's prompt, as the reader sees it."""
        lines = self.stages.evidence_lines("test")[:1]
        return self.new_inputs(self.data.test[:1], lines).texts[0]

    @classmethod
    def restore(cls, folder: Path, args: RunArguments, context: Context) -> Self | None:
        """Open a trained reader by its folder; one that was not trained has none."""
        if not args.trains and not (folder / RECORD_FILE).is_file():
            return None
        return super().restore(folder, args, context)


# What is trained.


@dataclass(frozen=True)
class LMClassifier(Classifier):
    """A causal LM while it is trained.

    Attributes:
        module: What is trained.
        lm: Its tokens; no weights of it are loaded.
        words: Word by label.
        batch_tokens: Padded tokens of a dev batch on a CPU; a GPU takes 16 times as many.
    """

    module: CausalModule
    lm: CausalLM
    words: Mapping[str, str]
    batch_tokens: int = 2048

    @property
    def labels(self) -> Sequence[str]:
        """The labels in the task's order."""
        return list(self.words)

    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:  # noqa: ARG002
        """Return what makes batches of prompts and the words of their labels."""
        return partial(collate, self.lm, self.words)

    @torch.inference_mode()
    def score(self, inputs: Prompts, context: Context) -> Scores:
        """Return the log-probability of each label's word, (B, C); processes share the work."""
        rows = []  # words that share all but their last token need one reading
        for example, text in enumerate(inputs.texts):
            prompt, behind = self.lm.read_words(text, [f" {w}" for w in self.words.values()])
            groups: dict[tuple[int, ...], list[int]] = {}
            for column, word in enumerate(behind):
                groups.setdefault(tuple(word[:-1]), []).append(column)
            rows += [
                (example, prompt, {column: behind[column] for column in columns})
                for columns in groups.values()
            ]
        answers = [answer_row(prompt, next(iter(words.values()))) for _, prompt, words in rows]
        sizes = [len(answer["labels"]) for answer in answers]
        device, worker = self.module.device, context.worker
        advice = "the LM that is trained: use a smaller --reader_lm, or less --max_reader_tokens"
        back_off = BackOff(batch_budget(self.batch_tokens, device), advice)

        def size(batch: Sequence[int]) -> int:
            return len(batch) * max(sizes[row] for row in batch)

        def run(batch: Sequence[int]) -> tuple[list[tuple[int, ...]], Tensor]:
            padded = pad([answers[row] for row in batch])
            number = {place: n for n, place in enumerate(padded["places"].tolist())}
            spots, tokens, asked = (list[tuple[int, ...]]() for _ in range(3))
            for line, row in enumerate(batch):
                example, prompt, words = rows[row]
                length = sizes[row] - len(prompt)
                for column, word in words.items():
                    tokens += [(len(spots) + step, token) for step, token in enumerate(word)]
                    asked.append((example, column, length))
                spots += [(line, number[len(prompt)] + step) for step in range(length)]
            output = self.module(**{name: send(value, device) for name, value in padded.items()})
            read_from = tuple(send(torch.tensor(spots).T.contiguous(), device))
            chances = output.logits[read_from].float().log_softmax(dim=1)  # (spots, V)
            return asked, chances[tuple(send(torch.tensor(tokens).T.contiguous(), device))]

        was_training = self.module.training
        self.module.eval()
        batches = worker.share(token_budget_batches(sizes, back_off.budget))
        done = [part for batch in batches for part in back_off.run(batch, size, run)]
        self.module.train(was_training)
        asked = [word for words, _ in done for word in words]
        held = torch.cat([torch.empty(0, device=device), *(part for _, part in done)])
        chances = iter(held.tolist())
        found = [(*names, sum(islice(chances, length))) for *names, length in asked]
        scores = np.empty((len(inputs), len(self.words)), np.float32)
        for example, column, value in gather(found, worker):
            scores[example, column] = value
        return scores


def collate(
    lm: CausalLM, words: Mapping[str, str], rows: Sequence[tuple[str, str, str]]
) -> dict[str, Any]:
    """Make a training batch of examples' ids, prompts and labels."""
    answers = []
    for _, text, label in rows:
        prompt, (word,) = lm.read_words(text, [f" {words[label]}"])
        answers.append(answer_row(prompt, word))
    return {**pad(answers), "example_ids": tuple(name for name, _, _ in rows)}
