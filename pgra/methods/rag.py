"""RAG (Lewis et al. 2020): each evidence is read alone, and the query encoder learns what to read.

    p(z|x)   = softmax over the best d of k candidates of d(z)'q(x)      (section 2.2)
    p(y|x)   = sum over z of p(z|x) p(y|x,z)                             (RAG-Sequence, section 2.1)
    label    = the one whose words have the largest p(y|x)

The reader and the query encoder are trained, passages' vectors stay as the index has them (section
2.4). Candidates are the first stage's k, found once by the encoder as it was; in each step the
query encoder as it is then takes its best d of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from pgra.core import MISSING_ROW
from pgra.encoders.encoder import Encoder, load_encoder
from pgra.errors import ConfigError
from pgra.methods.pgra import Pgra
from pgra.reader.rag import Passages, PooledInputs, RagReader, build_pooled
from pgra.retrieval import IndexRequest, find_retriever
from pgra.retrieval.shards import find_shards, read_rows


class Rag(Pgra):
    """Trains a reader and a query encoder on candidates to choose among."""

    def open(self) -> None:
        """Refuse what a sum over evidence cannot do; then as PGRA."""
        reader = self.pgra.reader
        refused: Mapping[str, bool] = {
            f"decode '{reader.decode}'": reader.decode != "verbalizer",
            "length_normalize": reader.length_normalize,
            "lora_rank": reader.lora_rank is not None,
            "evidence_attention": reader.evidence_attention,
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise ConfigError(
                    f"{name} is not for method 'rag', which sums a label's probability over "
                    "evidence that is read piece by piece: leave it out"
                )
        super().open()

    def open_reader(self, trained: Path | None = None) -> RagReader:
        """Load both models as training starts from them, or as it left them."""
        name = str(trained or self.pgra.reader.model_name_or_path)
        return RagReader.open(name, self._encoder, self.pgra.rerank.num_evidence)

    def inputs(self, split: str) -> PooledInputs:
        """Return the examples of a split with their candidates."""
        rows = self.stages.candidates[split].candidates.rows
        distinct = np.unique(rows[rows != MISSING_ROW])
        texts = self.stages.corpus.texts(distinct)
        return build_pooled(
            self.data.examples(split),
            rows,
            Passages(distinct, texts, read_rows(find_shards(self._index), distinct)),
            self._encoder,
            self.tokenizer,
            verbalizer=self.verbalizer,
            layout=self.layout,
        )

    @cached_property
    def _encoder(self) -> Encoder:
        """Load what the query encoder begins as; in float32, for it is trained."""
        retriever = replace(self.pgra.retriever, encoder_dtype="float32")
        return load_encoder(retriever, self.context.device)

    @cached_property
    def _index(self) -> Path:
        """Find the first stage's index, which is built by now."""
        request = IndexRequest(
            args=self.pgra.retriever,
            corpus=self.stages.corpus,
            context=replace(self.context, progress=False),
        )
        return find_retriever(self.pgra.retriever.retriever).prepare(request)[0].folder
