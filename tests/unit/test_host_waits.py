"""What the host waits for in each loop over batches, on a device that only looks like one."""

from contextlib import nullcontext
from dataclasses import replace
from shutil import copytree

import pytest
import torch
from conftest import SENTENCES
from meta_device import MetaDevice
from small_reranking import QUERIES
from small_training import classifier_of, make_inputs, tokens
from transformers import AutoConfig

from pgra.core import Context
from pgra.encoders.encoder import Encoder
from pgra.lm.batching import GroupCost, send
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.ralm import LMClassifier, Prompts
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate
from pgra.reader.causal import CausalModule
from pgra.reader.fid import FusionReader
from pgra.reader.predict import Decision
from pgra.rerank import RerankRequest, open_reranker
from pgra.rerank.base import RerankArguments
from pgra.rerank.cross_encoder import CrossEncoderArguments

META = torch.device("meta")
LOOPS = ["encoder", "lm", "expanded", "whole", "whole_gpt2", "words", "cross_encoder", "reader"]
LOOPS += ["official", "attention", "ralm", "reader_steps", "ralm_steps"]


@pytest.fixture
def encoder(encoder_dir):
    encoder = Encoder.from_name(str(encoder_dir), device="cpu", encoder_batch_tokens=1)
    encoder.device, encoder._back_off.budget = META, 64
    return encoder.encode, encoder.model.to(META)


def reading(folder, sharing):
    lm = CausalLM.from_name(str(folder), dtype="float16")
    prompt = FewShotPrompt(PromptTemplate("{text} It was"), "A great film. It was good. ")
    encoder = PromptedEncoder(lm, prompt, sharing, batch_tokens=64)
    assert (lm.width, encoder.way) == (32, sharing)  # while the LM has numbers
    vars(encoder).pop("_behind", None)
    vars(lm).pop("_is_unasked")
    lm.device = META
    return encoder.encode, lm.model.to(META)


@pytest.fixture
def lm(lm_dirs):
    return reading(lm_dirs["opt"], "cascade")


@pytest.fixture
def expanded(lm_dirs):
    return reading(lm_dirs["opt"], "expanded")


@pytest.fixture
def whole(lm_dirs):
    return reading(lm_dirs["llama"], "none")


@pytest.fixture
def whole_gpt2(lm_dirs, tmp_path):
    # where its config names a padding token, a GPT-2 without a mask looks for it
    folder = copytree(lm_dirs["gpt2"], tmp_path / "lm")
    config = AutoConfig.from_pretrained(folder)
    config.pad_token_id = config.eos_token_id
    config.save_pretrained(folder)
    return reading(folder, "none")


@pytest.fixture
def writer(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["opt"]), dtype="float32", with_head=True)
    assert (lm.reader.fault, lm.reader.room > 0, lm.head.bias) == (None, True, None)
    lm.reader.adds_mask = True
    lm.reader._back_off.budget, lm.reader._cost = 64, GroupCost(8, 64)
    lm.device = META
    lm.whole.to(META)
    return lm


@pytest.fixture
def words(writer):
    return lambda texts: writer.score(texts, [" great", " not at all bad"]), writer.model


@pytest.fixture
def cross_encoder(cross_encoder_dir, corpus, tmp_path):
    reranker = open_reranker(
        RerankRequest(
            args=RerankArguments(reranker="cross-encoder", lm_dtype="float32", lm_batch_tokens=64),
            prompt=FewShotPrompt(PromptTemplate("{text}")),
            corpus=corpus,
            context=Context(artifacts=tmp_path, device="cpu"),
            options=CrossEncoderArguments(cross_encoder=str(cross_encoder_dir)),
        )
    )
    reranker.device = META

    def read(texts):
        pairs = reranker.tokenize([QUERIES[0].text] * len(texts), texts)
        return reranker.compute(pairs, int)()

    return read, reranker.model.to(META)


@pytest.fixture
def fused(t5_dir, monkeypatch):
    monkeypatch.setattr(FusionReader, "deciding", lambda self: nullcontext())  # autocast knows no
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # such device
    reader = FusionReader.from_name(str(t5_dir)).to(META)
    classifier = classifier_of(reader, t5_dir, batch_tokens=64)
    return classifier, lambda texts: tokens(t5_dir, make_inputs(len(texts)))


@pytest.fixture
def reader(fused):
    classifier, inputs = fused
    return lambda texts: classifier.score(inputs(texts)), classifier.module.model


@pytest.fixture
def official(fused):
    classifier = replace(fused[0], decision=Decision("official"))
    return lambda texts: classifier.score(fused[1](texts)), classifier.module.model


@pytest.fixture
def attention(fused):
    classifier, inputs = fused
    return lambda texts: classifier.attend(inputs(texts)), classifier.module.model


@pytest.fixture
def lm_that_trains(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu")
    module = CausalModule.from_name(str(lm_dirs["opt"])).to(META)
    return LMClassifier(module, lm.tokenizer, lm, {"bad": "not good", "good": "great"}, 64)


def prompts(texts):
    return Prompts([str(n) for n in range(len(texts))], ["good"] * len(texts), texts)


@pytest.fixture
def ralm(lm_that_trains):
    return lambda texts: lm_that_trains.score(
        prompts(texts), Context()
    ), lm_that_trains.module.model


def steps_of(classifier, inputs):
    """Train as the Trainer does: collated on the host, sent, forward and backward."""

    def read(texts):
        rows, make = inputs(texts), classifier.collator(META)
        for start in range(0, len(texts), 2):
            batch = make([rows[i] for i in range(start, min(start + 2, len(texts)))])
            del batch["example_ids"]
            batch = {
                key: send(value, META) if isinstance(value, torch.Tensor) else value
                for key, value in batch.items()
            }
            classifier.module.train()(**batch, num_items_in_batch=2).loss.backward()

    return read, classifier.module.model


@pytest.fixture
def ralm_steps(lm_that_trains):
    return steps_of(lm_that_trains, prompts)


@pytest.fixture
def reader_steps(fused):
    return steps_of(*fused)


@pytest.mark.parametrize("loop", LOOPS)
def test_no_batch_waits_for_the_device(loop, request):
    read, model = request.getfixturevalue(loop)
    batches = []
    model.register_forward_hook(lambda *_: batches.append(1))

    def count(num_texts):
        batches.clear(), device.waits.clear()
        read(SENTENCES * num_texts)
        return len(batches), dict(device.waits)

    with MetaDevice() as device:
        read(SENTENCES)  # fast ways are compared with stock ones, and vectors are copied
        (few, waits), (many, waits_of_many) = count(1), count(3)
        assert many > few
        assert waits == waits_of_many
        assert sum(waits.values()) < few
        model.register_forward_hook(lambda _, __, made: _ask(made))
        assert sum(count(3)[1].values()) == many + sum(waits.values())  # the control


def _ask(made):
    made = made if isinstance(made, torch.Tensor) else next(iter(made.values()))
    bool(made.flatten()[0])


@pytest.mark.parametrize("num_texts", [1, 3])
def test_text_that_is_written_is_waited_for_once_a_token(num_texts, writer):
    calls = []
    writer.model.register_forward_hook(lambda *_: calls.append(1))

    def count():
        calls.clear(), device.waits.clear()
        writer.complete(SENTENCES * num_texts, max_new_tokens=5, stop="no such word")
        return len(calls), sum(device.waits.values())

    with MetaDevice() as device:
        count()
        num_calls, waits = count()
        assert 5 <= waits <= num_calls < 5 * len(SENTENCES) * num_texts
        writer.model.register_forward_hook(lambda _, __, made: _ask(made))
        assert count() == (num_calls, waits + num_calls)  # the control
