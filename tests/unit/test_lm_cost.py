"""Costs from a configuration against the real model, and speed as a fill would read."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from conftest import SENTENCES
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, OPTConfig

from pgra.errors import ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.cost import LmShape, estimate_reading, measure_speed, own_lengths, time_reading
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

PROMPT = FewShotPrompt(PromptTemplate("Good?\n{text}"), "Follow:\nGood?\nA film.\nThe answer is no")
BY_HAND = LmShape(3, 8, 8, attended=8, cached=4, middle=32, weights=1500, matrices=1000)


@pytest.fixture
def lm(lm_dir):
    return CausalLM.from_name(str(lm_dir), device="cpu")


@pytest.fixture
def shape(lm):
    return LmShape.of(lm.config)


def test_weights_state_and_cache_are_the_models(lm, shape):
    assert shape.weight_bytes(4) == sum(4 * p.numel() for p in lm.model.parameters())
    assert shape.weight_bytes(2) * 2 == shape.weight_bytes(4)
    assert shape.state == lm.width
    cache = lm.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    kept = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    assert shape.cache_bytes(3, 4) == kept


def test_operations_are_those_that_are_counted_in_the_model(lm, shape):
    model = AutoModel.from_pretrained(lm.source.path, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(40)[None])
    # Eager attention also multiplies what the mask hides: all 40 x 40, where 820 are looked at.
    hidden = 4 * shape.layers * shape.attended * (40 * 40 - 820)
    assert shape.flops([40]) + hidden == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_operations_and_bytes_by_hand():
    shape = BY_HAND
    # 3 tokens: 2 x 1000 each; they look at 1 + 2 + 3 keys, at 4 x 3 x 8 each.
    assert shape.flops([3]) == 6000 + 96 * 6
    assert replace(shape, is_causal=False).flops([3]) == 6000 + 96 * 9  # it looks both ways
    assert shape.flops([3, 1]) == 6000 + 96 * 6 + 2000 + 96
    assert shape.flops([5]) + shape.flops([3], behind=5) == shape.flops([8])
    assert shape.cache_bytes(10, 2) == 2 * 3 * 4 * 10 * 2
    assert shape.weight_bytes(2, "8bit") == 1000 + 500 * 2
    assert shape.weight_bytes(2, "4bit") == 562 + 500 * 2  # half a byte, and its scales
    assert shape.batch_bytes(10, 2) == 480 + (4 * 8 + 3 * 32) * 10 * 2


def test_a_13b_is_laid_out_without_its_memory():
    sizes = {"hidden_size": 5120, "ffn_dim": 20480, "word_embed_proj_dim": 5120}
    shape = LmShape.of(OPTConfig(num_hidden_layers=40, num_attention_heads=40, **sizes))
    assert shape.weights == 12_853_473_280
    assert shape.matrices == pytest.approx(12.58e9, rel=0.001)


def test_a_configuration_that_cannot_work_is_refused():
    with pytest.raises(ModelError, match="cannot lay out 'opt' from its configuration: embed_dim"):
        LmShape.of(OPTConfig(hidden_size=10, word_embed_proj_dim=10, num_attention_heads=4))


def test_a_reading_adds_up_its_kinds_of_texts(lm_dirs):
    """Of 10 texts two were sampled, with 2 and 4 own tokens behind 5; of another kind 1 of 1."""
    lm = CausalLM.from_name(str(lm_dirs["opt"]), dtype="float16", device="cpu")
    shape, kinds = LmShape.of(lm.config), [(10, [2, 4], [7, 9]), (1, [3], [8])]
    how = {"prefix": 5, "num_prefixes": 1, "batch_tokens": 10}
    shared = estimate_reading(lm, kinds, is_shared=True, num_cut=1, **how)
    assert (shared.tokens, shared.tokens_whole) == (10 * 3 + 3 + 5, 10 * 8 + 8)
    assert (shared.own_mean, shared.sampled, shared.cut) == (33 / 11, 3, 1 / 3)
    own = 5 * shape.flops([2, 4], behind=5) + shape.flops([3], behind=5)
    assert shared.flops == own + shape.flops([5])
    assert shared.flops_whole == 5 * shape.flops([7, 9]) + shape.flops([8])
    assert (shared.cache, shared.weights) == (shape.cache_bytes(5, 2), shape.weight_bytes(2))
    assert shared.device_bytes == shared.cache + shared.weights + shape.batch_bytes(10, 2)
    assert shared.device == "cpu, 1 thread, float16"
    whole = [(count, whole, whole) for count, _, whole in kinds]
    alone = estimate_reading(lm, whole, is_shared=False, **how)
    assert (alone.tokens, alone.flops) == (shared.tokens_whole, shared.flops_whole)
    assert alone.cache == 0
    assert (shared.is_shared, alone.is_shared) == (True, False)


def encoder_of(lm_dirs, **options):
    return PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"]), device="cpu"), PROMPT, **options)


def test_own_tokens_are_those_behind_the_prefix(lm_dirs):
    encoder = encoder_of(lm_dirs)
    prompts = encoder.tokenize([PROMPT.template.passage_fields(text) for text in SENTENCES]).ids
    shared = len(encoder.shared_ids)
    assert shared > 10
    assert own_lengths(encoder, prompts) == [len(ids) - shared for ids in prompts]
    assert own_lengths(encoder, [[1, 2, 3], *prompts])[0] == 3  # it does not begin with them
    assert own_lengths(encoder_of(lm_dirs, sharing="none"), prompts) == [len(i) for i in prompts]


class Reads:
    """Counts what it is given to read: each text is its own length, each a batch."""

    def __init__(self):
        self.num_tokens, self.read = 0, []

    def __call__(self, texts, advance):
        self.read.append(list(texts))
        for text in texts:
            self.num_tokens += text
            advance(1)
            time.sleep(0.001)


@pytest.mark.parametrize(("is_cpu", "tokens"), [(True, 39), (False, 40)])
def test_a_piece_is_read_warm_longest_first_and_its_last_batch_not_timed_on_a_cpu(is_cpu, tokens):
    model, texts = Reads(), [9, 1, 10, 9, 10, 1]
    shards = iter([(texts, texts)])
    speed = time_reading(model, shards, model, 60, batch_tokens=100, is_cpu=is_cpu)
    whole = sorted(texts, reverse=True)
    assert model.read == [[9], [9], whole, whole]  # load, guess, warm, timed
    assert (speed.texts, speed.tokens) == (6 - is_cpu, tokens)
    assert speed.tokens_per_second == speed.tokens / speed.seconds
    assert speed.load_seconds > 0


def test_pieces_are_few_batches_on_a_cpu_and_one_text_where_time_is_short():
    texts = [10] * 12
    model = Reads()
    time_reading(model, iter([(texts, texts)]), model, 60, batch_tokens=5, is_cpu=True)
    assert [len(piece) for piece in model.read] == [1, 1, 3, 3, 3, 3, 3]  # of 6 x 5 tokens
    model = Reads()
    time_reading(model, iter([(texts, texts)]), model, 1e-9, batch_tokens=5, is_cpu=False)
    assert [len(piece) for piece in model.read] == [1, 1, 1, 1]


def test_it_stops_when_the_time_is_up(lm_dirs):
    encoder = encoder_of(lm_dirs)
    encoder.encode(SENTENCES)
    start = time.perf_counter()
    speed = measure_speed(encoder, itertools.repeat(SENTENCES), seconds=0.2)
    assert 0.2 <= time.perf_counter() - start < 3
    assert speed.texts > len(SENTENCES)
