"""A device that only looks like one: what a program would wait for, and what it would copy.

`python tests/meta_device.py` counts that for BERT-base over 8,192 sentences, for a search, and for
training a T5-base: launches of a step, and the shapes that 5,000 steps have.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pgra.lm.batching import send

_QUESTIONS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"),
}
_COPIES = {"_to_copy", "copy_", "cpu", "to"}


class MetaDevice(TorchDispatchMode):
    """Stands in for a GPU: tensors on "meta" have no numbers, and every operation is seen.

    Attributes:
        waits: How often each kind of answer or copy was waited for: copies from the device, and
            those to it that do not go by `send`. Answers are yes, and what is copied is ones.
        sent: Bytes and dtype of each copy to the device.
        launches: Operations on the device that make something new.
    """

    def __init__(self):
        super().__init__()
        self.waits, self.sent, self.launches = Counter(), [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if name in _QUESTIONS and tensors[0].is_meta:
            self.waits[name] += 1
            return True
        if name in _COPIES:
            source = tensors[-1]
            asked = {str(each) for each in (*args, kwargs.get("device"))}
            asked |= {str(tensors[0].device)} if name == "copy_" else {name}
            if source.is_meta and "cpu" in asked:
                self.waits["copy to the host"] += 1
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if not source.is_meta and "meta" in asked:
                self.sent.append((source.nbytes, source.dtype))
                if not _is_sending():
                    self.waits["copy to the device"] += 1
        made = func(*args, **kwargs)
        is_new = isinstance(made, torch.Tensor) and made.is_meta and not func.is_view
        self.launches += is_new and name not in {"empty", "to", "detach"}
        return made


def _is_sending():
    frame = sys._getframe()
    while frame is not None and frame.f_code is not send.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def moved_to_meta(encoder):
    """Let an encoder run there; it cannot come back."""
    encoder.device = torch.device("meta")
    encoder.model.to("meta")
    with MetaDevice() as device:
        yield device


def _count_encoder(way):
    from transformers import AutoModel, BertConfig

    from pgra.config import CorpusArguments, RetrieverArguments
    from pgra.data.corpus import open_corpus
    from pgra.encoders.encoder import Encoder, EncoderParts
    from pgra.lm.load import find_model, load_tokenizer

    with TemporaryDirectory() as folder:
        arguments = CorpusArguments(corpus=["bundled:wikipedia-19k"])
        texts = open_corpus(arguments, Path(folder)).slice(0, 8192)
    with torch.device("meta"):
        model = AutoModel.from_config(BertConfig(), dtype=torch.bfloat16)
    encoder = Encoder(
        EncoderParts(
            args=RetrieverArguments(),
            model=model.eval(),
            tokenizer=load_tokenizer(find_model("bundled:minilm-l6")),
            fingerprint={"max_tokens": 128, "pooling": "mean", "normalize": True},
            device=torch.device("meta"),
        )
    )
    with MetaDevice() as device:
        encoder.begin(encoder.tokenize(texts[:1]))()  # finds out which mask the model takes
        device.waits.clear(), device.sent.clear()
        device.launches = 0
        (chunk,) = encoder.tokenize(texts)
        encoder.begin([chunk], in_half=True)()
    print(  # noqa: T201
        f"{way}: {len(chunk.batches)} batches, {chunk.lengths.sum() / len(chunk.ids):.1%} of the "
        f"tokens real, {device.launches} launches, {device.waits['is_nonzero']} waits in batches, "
        f"{device.waits['copy to the host']} copies back, {len(device.sent)} there of "
        f"{sum(size for size, _ in device.sent):,} bytes"
    )


def _count_search(num_rows=1_000_000, width=768, num_queries=9600):
    import numpy as np

    from pgra.retrieval.faiss import VectorSource
    from pgra.retrieval.half_search import HalfSearch

    block = np.ones((8192, width), np.float16)

    def halves():
        return (block[: num_rows - start] for start in range(0, num_rows, len(block)))

    search = HalfSearch(VectorSource(num_rows, width, None, None, halves), "meta")
    queries = np.ones((num_queries, width), np.float32)
    for name in ("first search", "next search"):
        with MetaDevice() as device:
            for start in range(0, num_queries, 4096):
                search.search(queries[start : start + 4096], 150)
        sizes = {kind: sum(s for s, k in device.sent if k == kind) for _, kind in device.sent}
        told = f"{device.launches} launches, {dict(device.waits)}, bytes sent {sizes}"
        print(f"{name}: {told}")  # noqa: T201


def _count_reader(num_steps=5000, batch=8, depth=16):
    import numpy as np
    from transformers import T5Config, T5ForConditionalGeneration

    from pgra.config import CorpusArguments, DataArguments
    from pgra.data.corpus import open_corpus
    from pgra.data.examples import load_splits
    from pgra.data.tasks import Task
    from pgra.lm.batching import GroupCost, group_by_length
    from pgra.lm.load import find_model, load_tokenizer
    from pgra.prompts.verbalizer import Verbalizer
    from pgra.reader.fid import FusionReader
    from pgra.reader.inputs import SegmentLayout, build_inputs, collate

    task, rng = Task.load("rotten-tomatoes"), np.random.default_rng(0)
    data = DataArguments(task=task.name, dataset_name="bundled:rotten-tomatoes")
    examples = load_splits(task, data).train
    with TemporaryDirectory() as folder:
        corpus = open_corpus(CorpusArguments(corpus=["bundled:wikipedia-19k"]), Path(folder))
        rows = rng.integers(len(corpus), size=(len(examples), depth))
        evidence = [corpus.texts(line) for line in rows]
    layout = SegmentLayout(task.reader_template, "query_first", 128)
    tokenizer = load_tokenizer(find_model("bundled:t5-small-titles"))
    words = Verbalizer(dict(task.verbalizer), task.reader_template)
    inputs = build_inputs(examples, evidence, tokenizer, words, layout=layout)
    lengths = np.array([[len(s) for s in inputs[i].segments] for i in range(len(inputs))])
    cost = GroupCost.on(torch.device("cuda"), is_training=True)
    steps = [lengths[rng.choice(len(lengths), batch, replace=False)] for _ in range(num_steps)]
    one = sum(len(group_by_length(step.ravel(), cost)) == 1 for step in steps)
    print(f"{one:,} of {num_steps:,} steps read their segments in one call")  # noqa: T201
    for wide, long in ((1, 1), (8, 64), (16, 128), (32, 256), (128, 2048)):
        # Of a step's encoder and of its decoder's evidence: rounded up as buckets would have it.
        shapes = [
            (-(-int(step.max()) // wide) * wide, -(-int(step.sum(1).max()) // long) * long)
            for step in steps
        ]
        padded = sum(width for width, _ in shapes) * batch * depth
        seen = Counter(shapes)
        print(  # noqa: T201
            f"lengths to {wide}, evidence to {long}: {len(seen):,} shapes, "
            f"{sum(n for n in seen.values() if n == 1):,} of them once; of the encoder's tokens "
            f"{sum(step.sum() for step in steps) / padded:.1%} are real"
        )
    size = {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072}
    with torch.device("meta"):
        reader = FusionReader(
            T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0))
        ).train()
    torch.is_autocast_enabled = lambda kind: False  # it knows no such device
    tensors = collate([inputs[i] for i in range(batch)], pad_token_id=0, cost=cost)
    tensors.pop("example_ids")
    with MetaDevice() as device:
        for name in ("first step", "next step"):
            device.launches = 0
            sent = {k: v.to("meta") if hasattr(v, "to") else v for k, v in tensors.items()}
            loss = reader(**sent).loss
            forward = device.launches
            loss.backward()
            print(f"{name}: {forward} launches, {device.launches - forward} backward")  # noqa: T201


if __name__ == "__main__":
    import os

    for way in ("auto", "off"):
        os.environ["PGRA_FAST_KERNELS"] = way
        _count_encoder(f"--fast_kernels {way}")
    os.environ["PGRA_FAST_KERNELS"] = "auto"
    _count_search()
    _count_reader()
