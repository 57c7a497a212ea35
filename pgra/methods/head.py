"""`--method head`: labels by a frozen LM's states and its own opinion, learnt from few examples.

The LM reads each example once under the task's prompt; `pgra.rerank.head` has the arithmetic.
Nothing of the LM is trained, so a run takes seconds. `pgra.Classifier` is the same from Python.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pgra.arrays import Vectors
from pgra.encoders.encoder import Encoder
from pgra.errors import PgraError
from pgra.lm.base import DEPTHS
from pgra.lm.load import is_encoder
from pgra.lm.prefix import PromptedEncoder, StateColumns
from pgra.lm.state_lm import StateLM
from pgra.methods.arguments import METHODS, RunArguments
from pgra.methods.base import SPLITS, Decisions, Method, TaskData, decide_labels
from pgra.methods.held_out import HeldOut
from pgra.methods.stages import set_aside, write_prompt
from pgra.reader.calibration import LEAST_EXAMPLES, Calibration
from pgra.rerank.base import query_keys
from pgra.rerank.head import fit_labels
from pgra.rerank.similarity import Calibrated
from pgra.rerank.states import StateBank
from pgra.types import Example, Json

logger = logging.getLogger(__name__)

SMALL_ENCODERS = ("bundled:minilm-l6", "sentence-transformers/all-MiniLM-L6-v2")
_UNDIVIDED = ("train", "test")


class LabelReader:
    """Reads texts for heads: an LM's states under a prompt, then an encoder's vectors.

    Attributes:
        prompted: The LM under its prompt; None where the encoder is alone.
        encoder: The encoder; None where the LM is alone.
    """

    def __init__(
        self,
        prompted: PromptedEncoder | None,
        encoder: Any,
        words: Mapping[str, str],
        device: str = "auto",
    ) -> None:
        """Take an LM or an encoder, by its name or open, or both; and the labels' words.

        An encoder "auto" is a small one that is at hand, "none" is none.
        """
        self.prompted = prompted
        self.inputs = ("text",) if prompted is None else prompted.prompt.template.inputs
        self._words = list(words.values())
        if encoder in ("none", None):
            encoder = None
        elif encoder == "auto":
            encoder = find_small_encoder(device)
        elif not isinstance(encoder, Encoder):
            encoder = Encoder(encoder, device=device)
        self.encoder: Encoder | None = encoder

    @property
    def encoder_name(self) -> str:
        """The encoder's name; "none" without one."""
        return "none" if self.encoder is None else self.encoder.args.encoder

    @cached_property
    def columns(self) -> StateColumns:
        """How what is read is divided."""
        columns = StateColumns([]) if self.prompted is None else self.prompted.columns(self._words)
        if self._are_scored:
            count = len(self._words)
            widths = [*columns.widths[:-1], columns.widths[-1] + count]
            columns = StateColumns(widths, words=np.eye(count, count + 1, dtype=np.float32))
        if self.encoder is None:
            return columns
        widths = [*columns.widths, self.encoder.width]
        return StateColumns(widths, has_encoder=True, words=columns.words)

    @cached_property
    def _are_scored(self) -> bool:
        """Whether words are scored whole: their first tokens, or states, do not tell them apart."""
        if self.prompted is None or type(self.prompted.lm).scores is StateLM.scores:
            return False
        ids = self.prompted.word_ids(self._words)
        is_alike = len({word[0] for word in ids}) < len(ids)
        return is_alike or self.prompted.lm.word_rows(ids) is None

    @cached_property
    def blank(self) -> Vectors:
        """What is known of texts without content, (3, W)."""
        others = dict.fromkeys(self.inputs, "")
        return self.read(
            [Example("", {**others, self.inputs[0]: text}) for text in Calibrated.content_free]
        )

    def read(self, examples: Sequence[Example], states: Vectors | None = None) -> Vectors:
        """Return what is known of examples, (n, W); `states` are the LM's, if it read them."""
        if not examples:
            return np.empty((0, sum(self.columns.widths)), np.float32)
        blocks = []
        if self.prompted is not None:
            blocks.append(self.prompted.encode_examples(examples) if states is None else states)
            if self._are_scored:
                blocks.append(self.prompted.score_words(examples, self._words))
        if self.encoder is not None:
            blocks.append(self.encoder.encode([example.text for example in examples]))
        return np.concatenate(blocks, axis=1)

    def read_shown(self, examples: Sequence[Example]) -> Vectors:
        """Return what is known of the prompt's own examples, (m, W): an encoder's vectors alone.

        Without an encoder it is nothing, (0, W).
        """
        width = sum(self.columns.widths)
        if self.encoder is None:
            return np.empty((0, width), np.float32)
        vectors = self.encoder.encode([example.text for example in examples])
        blank = np.zeros((len(examples), width - self.encoder.width), np.float32)
        return np.concatenate([blank, vectors], axis=1)


@cache
def find_small_encoder(device: str) -> Encoder | None:
    """Open the small encoder that is at hand; None if there is none."""
    for name in SMALL_ENCODERS:
        try:
            return Encoder(name, device=device)
        except PgraError as error:
            logger.info("%s", error)
    logger.warning("no small text encoder is at hand: the LM decides alone")
    return None


class HeadMethod(Method):
    """Reads training examples with a frozen LM, fits heads to their states, and decides by them."""

    SECTIONS = METHODS["head"].sections

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:  # noqa: ARG003 (the contract's)
        return False

    def open(self) -> None:
        """Read the task, write the prompt and find the LM; of an encoder there is no prompt.

        Raises:
            ConfigError: If there are too few examples for the prompt, or it leaves no room.
            DataError: If the data cannot be read.
            ModelError: If the LM cannot be used.
        """
        self.data = TaskData.read(self.args, least_dev=LEAST_EXAMPLES).labelled()
        args = self.args["head"]
        device = self.context.device
        words = self.data.task.prompt_words
        self.bank: StateBank | None = None
        if is_encoder(args.lm):
            self.reader = LabelReader(None, args.lm, words, device)
        else:
            prompt = write_prompt(self.data, args)
            self.data = set_aside(self.data, prompt.exemplar_ids)
            encoder = PromptedEncoder.open(args, prompt, device, DEPTHS)
            self.reader = LabelReader(encoder, args.head_encoder, words, device)
            self.bank = StateBank(
                encoder,
                encoder.fingerprint,
                self.context,
                shard_rows=args.bank_shard_rows,
                suffix="-queries",
            )
        # Without a dev set it learned from all rows, as others' pools: there is no division.
        self.fingerprints |= self.data.fingerprints(SPLITS if self.data.dev else _UNDIVIDED)

    def identity(self) -> dict[str, Json]:
        prompted = self.reader.prompted
        fields = {} if prompted is None else dict(prompted.fingerprint)
        if self.reader.encoder is not None:
            fields["head_encoder"] = self.reader.encoder.fingerprint
        return fields

    @classmethod
    def sources(cls, args: RunArguments) -> list[tuple[str, str]]:
        return [*super().sources(args), ("model", args["head"].lm)]

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        if self.bank is None:
            return
        with self.timed("states"):
            for split in splits:
                self.bank.read_queries(self.data.examples(split), "LM reads texts")

    def _read(self, examples: Sequence[Example]) -> Vectors:
        """Return what heads learn from, (n, W); splits' states are kept in the LM's bank."""
        is_split = any(list(examples) == self.data.examples(split) for split in SPLITS)
        if self.bank is None or not is_split:
            return self.reader.read(examples)
        self.bank.read_queries(examples, "LM reads texts")
        return self.reader.read(examples, self.bank.states(query_keys(examples)))

    def fit(self, folder: Path) -> Mapping[str, Json]:  # noqa: ARG002 (it is fitted again to load)
        train = self.data.train
        states = self._read(train)
        shown = self.reader.read_shown(self.data.set_aside)
        fit = fit_labels(
            np.concatenate([states, shown]),
            self.reader.columns,
            [*train, *self.data.set_aside[: len(shown)]],
            list(self.data.labels),
            num_shown=len(shown),
        )
        self.model = fit.model
        held_out = HeldOut.of(fit).beside(fit, states, train, self.reader.encoder_name)
        logger.info("%s", held_out)
        record: dict[str, Json] = {"held_out_accuracy": held_out.accuracy}
        dev = self.data.dev
        if not dev:
            return record
        values = self.data.measure_dev_scores(self.model.score(self._read(dev)))
        metric = self.data.metric
        return {"metric": metric, "value": values[metric], **record}

    def decide(self, examples: Sequence[Example]) -> Decisions:
        scores = self.model.score(self._read(examples))
        if self.reader.prompted is not None:
            self.reader.prompted.release()
        return decide_labels(examples, scores, self.data, Calibration(), "none")

    def sample_prompt(self) -> str | None:
        prompted = self.reader.prompted
        return None if prompted is None else prompted.prompt.write(self.data.test[0].fields)
