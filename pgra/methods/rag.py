"""RAG (Lewis et al. 2020): each evidence is read alone, and the query encoder learns what to read.

    p(z|x)   = softmax over the best d of k candidates of d(z)'q(x)      (section 2.2)
    p(y|x)   = sum over z of p(z|x) p(y|x,z)                             (RAG-Sequence, section 2.1)
    label    = the one whose words have the largest p(y|x)

The reader and the query encoder are trained, passages' vectors stay as the index has them (section
2.4). Candidates are the first stage's k, found once by the encoder as it was; in each step the
query encoder as it is then takes its best d of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from pgra.config import PgraArguments
from pgra.core import ALONE, MISSING_ROW, Context, Rows
from pgra.data.corpus import Corpus
from pgra.encoders.encoder import Encoder, load_encoder
from pgra.errors import ConfigError
from pgra.methods.base import Prepared, prepare_runs
from pgra.methods.pgra import segment_layout
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.rag import Passages, PooledInputs, RagReader, build_pooled
from pgra.retrieval import IndexRequest, find_retriever
from pgra.retrieval.shards import read_vectors
from pgra.runs import Outcome, run_reader


def run(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    context: Context = ALONE,
) -> Outcome:
    """Find candidates, train a reader and a query encoder on them, and measure both.

    Args:
        args: As of Fusion-in-Decoder; `num_candidates` is what the query encoder chooses among,
            `num_evidence` what is read.
        training: The Trainer's arguments; `output_dir` is the run.
        context: Who shares the work.

    Raises:
        ArtifactError: If the folder holds another run.
        ConfigError: If something is asked for that this method cannot do.
        PgraError: As each stage says.
    """
    check_method(args)
    prepared = prepare_runs(args, [training], context)
    return run_reader(Pooled(**vars(prepared)), training)


def check_method(args: PgraArguments) -> None:
    """Refuse what a sum over evidence cannot do.

    Raises:
        ConfigError: If it is asked for.
    """
    reader = args.reader
    refused: Mapping[str, bool] = {
        f"decode '{reader.decode}'": reader.decode != "verbalizer",
        "length_normalize": reader.length_normalize,
        "lora_rank": reader.lora_rank is not None,
        "evidence_attention": reader.evidence_attention,
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise ConfigError(
                f"{name} is not for system 'rag', which sums a label's probability over evidence "
                "that is read piece by piece: leave it out"
            )


@dataclass(frozen=True)
class Pooled(Prepared):
    """A run's shared parts, with candidates to choose among instead of evidence."""

    def open_reader(self, trained: Path | None = None) -> RagReader:
        """Load both models as training starts from them, or as it left them."""
        name = str(trained or self.args.reader.model_name_or_path)
        return RagReader.open(name, self._encoder, self.args.rerank.num_evidence)

    def inputs(self, split: str) -> PooledInputs:
        """Give the examples of a split with their candidates."""
        rows = self.found.candidates[split].candidates.rows
        return build_pooled(
            self.found.examples(split),
            rows,
            self._passages(np.unique(rows[rows != MISSING_ROW])),
            self._encoder,
            self.tokenizer,
            verbalizer=self.verbalizer,
            layout=segment_layout(self.found.task, self.args.reader),
        )

    @cached_property
    def _encoder(self) -> Encoder:
        """Load what the query encoder begins as; in float32, for it is trained."""
        retriever = replace(self.args.retriever, encoder_dtype="float32")
        return load_encoder(retriever, self.args.runtime.device)

    @cached_property
    def _index(self) -> Path:
        """Find the first stage's index, which is built by now."""
        args, device = self.args.retriever, self.args.runtime.device
        context = replace(self.context, artifacts=self.args.artifacts, device=device)
        request = IndexRequest(args=args, corpus=self._corpus, context=context)
        return find_retriever(args.retriever).prepare(request)[0].folder

    @property
    def _corpus(self) -> Corpus:
        assert self.found.corpus is not None  # there is evidence, or it was refused
        return self.found.corpus

    def _passages(self, rows: Rows) -> Passages:
        return Passages(rows, self._corpus.texts(rows), read_vectors(self._index, rows))
