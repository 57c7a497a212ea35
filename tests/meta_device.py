"""A device that only looks like one: what a program would wait for, and what it would copy.

`python tests/meta_device.py` counts that for BERT-base over 8,192 sentences, for a search, and for
training a T5-base: launches of a step, and the shapes that 5,000 steps have. And for each loop over
batches beside transformers' own way: a padded batch with a mask (B, L), and results fetched. And
what it takes to compile the reader for a new shape.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pgra.lm.batching import send, token_budget_batches

_QUESTIONS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"),
}
_COPIES = {"_to_copy", "copy_", "cpu", "to"}
_NO_KERNELS = {"_unsafe_view", "detach", "empty", "empty_like", "new_empty", "to"}


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
        first = made[0] if isinstance(made, tuple) else made
        is_new = isinstance(first, torch.Tensor) and first.is_meta and not func.is_view
        is_idle = name == "dropout" and not args[2]  # where nothing is trained
        self.launches += is_new and not is_idle and name not in _NO_KERNELS
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

    from pgra.encoders.encoder import Encoder, EncoderParts
    from pgra.lm.load import find_model, load_tokenizer
    from pgra.retrieval.base import RetrieverArguments

    texts, tokenizer = _sentences(8192), load_tokenizer(find_model("bundled:minilm-l6"))
    with torch.device("meta"):
        model = AutoModel.from_config(BertConfig(), dtype=torch.bfloat16)
    encoder = Encoder(
        EncoderParts(
            args=RetrieverArguments(),
            model=model.eval(),
            tokenizer=tokenizer,
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
    if way.endswith("auto"):
        pairs, model = [(text,) for text in texts], encoder.model
        budget = encoder._back_off.budget
        stock = partial(tokenizer, truncation=True, max_length=128)
        stock.pad = tokenizer.pad
        _tell("encoder, stock", lambda: _read_stock(model, stock, pairs, budget, _mean), model)
        _tell("encoder, now", lambda: encoder.encode(texts), model)


def _tell(what, run, model):
    """Print what a batch of a loop launches and waits for, once its ways are found."""
    batches = []
    hook = model.register_forward_hook(lambda *_: batches.append(1))
    with MetaDevice() as device:
        run()
        batches.clear(), device.waits.clear()
        device.launches = 0
        run()
    hook.remove()
    count = len(batches)
    print(  # noqa: T201
        f"{what}: {count} batches, {device.launches / count:,.0f} launches a batch, "
        f"{sum(device.waits.values())} waits, {dict(device.waits)}"
    )


def _read_stock(model, tokenizer, texts, budget, take):
    """Read texts (or pairs) as transformers would: padded, and each batch fetched."""
    encoded = [tokenizer(*text) for text in texts]
    for batch in token_budget_batches([len(one["input_ids"]) for one in encoded], budget):
        padded = tokenizer.pad([encoded[i] for i in batch], return_tensors="pt").to("meta")
        with torch.inference_mode():
            take(model(**padded), padded["attention_mask"]).cpu()


def _mean(output, mask):
    total = (output.last_hidden_state * mask[..., None]).sum(1)
    return torch.nn.functional.normalize(total / mask.sum(1, keepdim=True)).float()


def _last(output, mask):
    rows = torch.arange(len(mask), device="meta")
    return output.last_hidden_state[rows, mask.sum(1) - 1]


def _sentences(count):
    from pgra.data.corpus import CorpusArguments, open_corpus

    with TemporaryDirectory() as folder:
        arguments = CorpusArguments(corpus=["bundled:wikipedia-19k"])
        return open_corpus(arguments, Path(folder)).slice(0, count)


def _count_lm(num_texts=2048, budget=8192):
    from transformers import AutoModel

    from pgra.lm import kernels
    from pgra.lm.causal_lm import CausalLM
    from pgra.lm.prefix import PromptedEncoder
    from pgra.prompts.fewshot import FewShotPrompt
    from pgra.prompts.template import PromptTemplate

    lm = CausalLM.from_name("bundled:smollm2-135m", device="cpu", dtype="float16")
    with torch.device("meta"):
        model = AutoModel.from_config(lm.config, dtype=torch.float16).eval()
    lm.device = torch.device("meta")
    vars(lm).update(model=model, whole=model, width=lm.config.hidden_size)
    first, *texts = _sentences(num_texts + 1)
    prompt = FewShotPrompt(PromptTemplate("{text} It was"), f"{first} It was good.\n" * 8)
    tokenizer = lm.tokenizer
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "right"
    whole = [(prompt.prefix + prompt.suffix({"text": text}),) for text in texts]
    _tell("LM, stock", lambda: _read_stock(model, tokenizer, whole, budget, _last), model)
    kernels.takes_one_row = lambda device: True  # as on a GPU
    for way in ("none", "expanded", "packed", "cascade"):
        encoder = PromptedEncoder(lm, prompt)
        encoder._found.append(way)
        encoder._back_off.budget = budget
        _tell(f"LM, {way}", lambda encoder=encoder: encoder.encode(texts), model)


def _count_cross_encoder(num_texts=2048, budget=8192):
    from tiny_models import build_cross_encoder
    from transformers import AutoModelForSequenceClassification, BertConfig

    from pgra.core import Context
    from pgra.data.corpus import CorpusArguments, open_corpus
    from pgra.prompts.fewshot import FewShotPrompt
    from pgra.prompts.template import PromptTemplate
    from pgra.rerank import RerankRequest, open_reranker
    from pgra.rerank.base import RerankArguments
    from pgra.rerank.cross_encoder import CrossEncoderArguments

    query, *texts = _sentences(num_texts + 1)
    with TemporaryDirectory() as folder:
        reranker = open_reranker(
            RerankRequest(
                args=RerankArguments(reranker="cross-encoder", lm_dtype="float32"),
                prompt=FewShotPrompt(PromptTemplate("{text}")),
                corpus=open_corpus(
                    CorpusArguments(corpus=["bundled:wikipedia-19k"]), Path(folder) / "corpus"
                ),
                context=Context(artifacts=Path(folder), device="cpu"),
                options=CrossEncoderArguments(
                    cross_encoder=str(build_cross_encoder(Path(folder) / "model"))
                ),
            )
        )
        reranker.device, reranker._back_off.budget = torch.device("meta"), budget
        with torch.device("meta"):  # as large as BERT-base; the tokenizer stays
            model = AutoModelForSequenceClassification.from_config(BertConfig(num_labels=1)).eval()
        reranker.model = model
        pairs = reranker.tokenize([query] * len(texts), texts)

        def stock():
            cut = [dict(pair) for pair in pairs]
            for batch in token_budget_batches([len(pair["input_ids"]) for pair in cut], budget):
                padded = reranker.tokenizer.pad([cut[i] for i in batch], return_tensors="pt")
                with torch.inference_mode():
                    model(**padded.to("meta")).logits.float().cpu()

        _tell("cross-encoder, stock", stock, model)
        _tell("cross-encoder, now", lambda: reranker.compute(pairs, int)(), model)


def _count_reader(num_steps=5000, batch=8, depth=16):
    import numpy as np
    from transformers import T5Config, T5ForConditionalGeneration

    from pgra.data.corpus import CorpusArguments, open_corpus
    from pgra.data.examples import DataArguments, load_splits
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
        config = T5Config(**size, decoder_start_token_id=0)
        reader, rest = (FusionReader(T5ForConditionalGeneration(config)).train() for _ in range(2))
        rest.model.encoder.block = torch.nn.ModuleList()  # which CUDA graphs would replace
    torch.is_autocast_enabled = lambda kind: False  # it knows no such device
    # A GPU has a kernel for each of these, which the device knows by other names.
    F.dropout = lambda x, p, training, inplace=False: torch.native_dropout(x, p, training)[0]
    F.rms_norm = lambda x, shape, weight, eps: F.layer_norm(x, shape, weight, None, eps)
    tensors = collate([inputs[i] for i in range(batch)], pad_token_id=0, cost=cost)
    tensors.pop("example_ids")
    sent = {k: v.to("meta") if hasattr(v, "to") else v for k, v in tensors.items()}
    stock, (many, length) = T5ForConditionalGeneration, (batch * depth, 128)
    with torch.device("meta"):  # Fusion-in-Decoder as it was released: all segments of 128 tokens
        t5 = stock(config).train()
        ids = torch.zeros(many, length, dtype=torch.long)
        mask = torch.ones(many, length, dtype=torch.long)

    def read_stock():
        encoded = t5.encoder(input_ids=ids, attention_mask=mask)
        encoded.last_hidden_state = encoded.last_hidden_state.view(batch, depth * length, -1)
        whole = mask.view(batch, -1)
        return t5(encoder_outputs=encoded, attention_mask=whole, labels=sent["labels"]).loss

    with MetaDevice() as device:
        for name, read in (
            *(("step, stock", read_stock) for _ in range(2)),
            *(("step, now", lambda: reader(**sent).loss) for _ in range(2)),
            *(("the same but for the encoder's blocks", lambda: rest(**sent).loss),) * 2,
        ):
            device.launches = 0
            device.waits.clear()
            for part in (t5, reader, rest):
                part.zero_grad()  # as before each step
            loss = read()
            forward = device.launches
            loss.backward()
            told = f"{forward} launches, {device.launches - forward} backward"
            print(f"{name}: {told}, waits {dict(device.waits)}")  # noqa: T201


def _time_tracing(lengths=(16, 32, 48, 64)):
    """Time what a new shape costs where the encoder's blocks are compiled for each."""
    from transformers import T5Config, T5ForConditionalGeneration

    from pgra.reader.fid import FusionReader

    size = {
        "num_layers": 12,
        "d_model": 768,
        "num_heads": 12,
        "d_ff": 3072,
        "num_decoder_layers": 1,
    }
    reader = FusionReader(T5ForConditionalGeneration(T5Config(**size, vocab_size=100))).train()
    for block in reader.blocks:
        block.compile(dynamic=False, backend="aot_eager")  # traced both ways, no code generated

    def step(length):
        start = process_time()
        embedded = torch.randn(2, length, 768, requires_grad=True)
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
        mask[0, ..., -1] = False
        with torch.autocast("cpu", torch.bfloat16):
            encoder = reader.model.encoder
            states = encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        states.float().sum().backward()
        return process_time() - start

    first, again = zip(*((step(length), step(length)) for length in lengths), strict=True)
    extra = [one - other for one, other in zip(first, again, strict=True)]
    told = ", ".join(f"{seconds:.1f}" for seconds in extra)
    print(f"compiled for a new shape: {told} s of CPU time")  # noqa: T201


if __name__ == "__main__":
    import os

    for way in ("auto", "off"):
        os.environ["PGRA_FAST_KERNELS"] = way
        _count_encoder(f"--fast_kernels {way}")
    os.environ["PGRA_FAST_KERNELS"] = "auto"
    _count_lm()
    _count_cross_encoder()
    _time_tracing()
    _count_reader()
