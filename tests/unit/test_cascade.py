"""Attention in two parts equals attention to all keys at once, and copies no prefix."""

import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import SENTENCES
from test_prefix import PROMPT, TEXTS, relative_error, whole_prompts

from pgra.lm import kernels as cascade
from pgra.lm.batching import RowLayout
from pgra.lm.causal_lm import CausalLM
from pgra.lm.kernels import Cascade, Spans, attend, prepare_prefix
from pgra.lm.load import find_model
from pgra.lm.prefix import WAYS, PromptedEncoder

LAYER = SimpleNamespace(layer_idx=1, is_causal=True)
HEADS, KEY_HEADS, WIDTH, S, R, T = 4, 2, 8, 11, 3, 5


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def tensors():
    query = draw(R, HEADS, T, WIDTH)
    key, value = draw(R, KEY_HEADS, T, WIDTH), draw(R, KEY_HEADS, T, WIDTH) + 1
    prefix = (draw(1, KEY_HEADS, S, WIDTH), draw(1, KEY_HEADS, S, WIDTH) - 1)
    return query, key, value, prefix


def whole_attention(query, key, value, prefix, scaling):
    """Softmax over the prefix's and the own keys together, in float64."""
    groups = HEADS // KEY_HEADS
    keys, values = (
        torch.cat([far.expand(R, -1, -1, -1), near], dim=2).repeat_interleave(groups, 1).double()
        for far, near in zip(prefix, (key, value), strict=True)
    )
    scores = query.double() @ keys.transpose(2, 3) * scaling
    seen = torch.ones(T, S + T, dtype=torch.bool).tril(S)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ values).transpose(1, 2).float()


def in_two_parts(query, key, value, prefix, scaling=0.3, **kwargs):
    other = tuple(torch.zeros_like(part) for part in prefix)
    told = Cascade(prepare_prefix([other, prefix], HEADS))
    return attend(LAYER, query, key, value, None, scaling=scaling, cascade=told, **kwargs)[0]


def test_two_parts_are_the_whole(tensors):
    torch.testing.assert_close(in_two_parts(*tensors), whole_attention(*tensors, 0.3))


def test_a_key_of_the_prefix_moves_the_result(tensors):
    query, key, value, prefix = tensors
    before = in_two_parts(query, key, value, prefix)
    prefix[0][0, 0, 3] += 1
    assert not torch.allclose(in_two_parts(query, key, value, prefix), before, atol=1e-3)


def test_what_stands_after_a_text_does_not_matter(tensors):
    query, key, value, prefix = tensors
    before = in_two_parts(query, key, value, prefix)
    key[0, :, 3:], value[0, :, 3:] = 99, -99
    after = in_two_parts(query, key, value, prefix)
    torch.testing.assert_close(after[0, :3], before[0, :3])
    assert not torch.allclose(after[0, 3:], before[0, 3:])


def test_huge_scores_do_not_overflow(tensors):
    query, key, value, prefix = tensors
    found = in_two_parts(query * 1000, key, value, prefix)
    torch.testing.assert_close(found, whole_attention(query * 1000, key, value, prefix, 0.3))


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "s_aux"])
def test_attentions_that_weigh_otherwise_are_refused(tensors, name):
    with pytest.raises(ValueError, match=f"with {name} cannot be taken in two parts"):
        in_two_parts(*tensors, **{name: 4})


def copies_of_the_prefix(encoder):
    """Encode; say in how many rows each batch's cache held the prefix, and what is left of them."""
    rows, left = [], []

    def look(_module, _args, kwargs, _output):
        cache = kwargs.get("past_key_values")
        if cache is not None:
            rows.append(len(cache.layers[0].keys))
            left.append(weakref.ref(cache))

    with encoder.lm.model.register_forward_hook(look, with_kwargs=True):
        encoder.encode(TEXTS)
    return max(rows, default=0), [ref for ref in left if ref() is not None]


def test_the_prefix_is_not_copied_behind_texts(lm_dir):
    lm = CausalLM.from_name(str(lm_dir))
    ours = PromptedEncoder(lm, PROMPT, sharing="cascade")
    stock = PromptedEncoder(lm, PROMPT, sharing="expanded")
    assert copies_of_the_prefix(ours) == (0, [])
    # The control has copies, which do not outlive their batch.
    rows, left = copies_of_the_prefix(stock)
    assert rows > 1
    assert left == []
    for encoder in (ours, stock):
        assert all(len(keys) == 1 for keys, _ in encoder._behind._prefix)


def test_spans_by_hand():
    spans = Spans.of(torch.tensor([5, 2, 4]), 9, torch.device("cpu"))
    assert spans.texts.tolist() == [0, 5, 7, 11]
    assert (spans.row.tolist(), spans.prefix.tolist(), spans.longest) == ([0, 11], [0, 9], 5)
    parts = (spans.texts, spans.row, spans.prefix)
    assert all(part.dtype == torch.int32 and part.is_contiguous() for part in parts)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1  # one copy to a GPU


def test_the_lm_goes_the_stock_way_again_afterwards(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["llama"]))
    before = lm.model.config._attn_implementation
    PromptedEncoder(lm, PROMPT, sharing="cascade").encode(SENTENCES)
    assert lm.model.config._attn_implementation == before


def test_bfloat16_errs_no_more_than_whole_prompts_in_bfloat16(lm_dir):
    truth = whole_prompts(lm_dir, TEXTS)
    errors = {}
    for sharing in ("cascade", "none"):
        lm = CausalLM.from_name(str(lm_dir), dtype="bfloat16")
        states = PromptedEncoder(lm, PROMPT, sharing=sharing).encode(TEXTS).float()
        errors[sharing] = ((states - truth).norm(dim=1) / truth.norm(dim=1)).mean()
    assert errors["cascade"] < 1.25 * errors["none"]


@pytest.mark.slow
def test_the_real_lm_gives_the_states_of_whole_prompts(two_threads):
    folder, texts = find_model("bundled:smollm2-135m").path, [*TEXTS[:3], *TEXTS[-3:]]
    truth, lm = whole_prompts(folder, texts), CausalLM.from_name(folder)
    for sharing in WAYS:
        states = PromptedEncoder(lm, PROMPT, sharing=sharing).encode(texts)
        assert relative_error(states, truth) < 1e-4


class FlashKernel:
    """FlashAttention-2 for many lengths as torch calls it on a GPU, with its demands, on a CPU.

    Attributes:
        takes_float32: It does not; where its numbers are looked at, it may.
        groups: Query heads a key head, of each call.
    """

    takes_float32 = False

    def __init__(self):
        self.groups = []

    def __call__(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, is_debug, **how):
        kinds = (torch.float16, torch.bfloat16, *([torch.float32] * self.takes_float32))
        if q.dtype not in kinds:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        assert {k.dtype, v.dtype} == {q.dtype}
        for part in (q, k, v):
            assert (part.dim(), part.stride(-1), part.shape[-1] % 8) == (3, 1, 0)
        for ends, longest, rows in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
            assert (ends.dtype, ends.dim()) == (torch.int32, 1)
            assert ends.is_contiguous()
            assert (int(ends[0]), int(ends[-1]), int(ends.diff().max())) == (0, rows, longest)
        assert len(cu_q) == len(cu_k)
        self.groups.append(q.shape[1] // k.shape[1])
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))  # (heads, T) float32
        for i in range(len(cu_q) - 1):
            own, seen = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
            keys, values = (x[seen].repeat_interleave(self.groups[-1], 1).float() for x in (k, v))
            scale = q.shape[-1] ** -0.5 if how["scale"] is None else how["scale"]
            scores = torch.einsum("thd,shd->hts", q[own].float(), keys) * scale
            if is_causal:
                after = torch.ones(scores.shape[1:], dtype=torch.bool).triu(
                    len(keys) - len(q[own]) + 1
                )
                scores = scores.masked_fill(after, -torch.inf)
            lse[:, own] = scores.logsumexp(-1)
            out[own] = torch.einsum("hts,shd->thd", scores.softmax(-1), values).to(q.dtype)
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def varlen_of_torch_211(
    kernel, q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux, scale, window_size=(-1, -1)
):
    """Its signature: fewer key heads are taken without a word."""
    is_causal = window_size == (-1, 0)
    found = kernel(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, is_causal, False, scale=scale)
    return found[:2] if return_aux.lse else found[0]


@pytest.fixture(params=["2.11", "this torch"])
def kernel(request, monkeypatch):
    """A GPU's way in cascade, on the CPU: one row, and the kernel behind `varlen_attn` emulated."""
    kernel = FlashKernel()
    monkeypatch.setattr(cascade, "takes_one_row", lambda device: True)
    if request.param == "2.11":
        old = functools.partial(varlen_of_torch_211, kernel)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old)
        yield kernel
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", kernel, "CPU")
        yield kernel


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("pgra")]


def test_one_row_of_a_gpu_gives_the_states_of_whole_prompts(lm_dir, kernel):
    kernel.takes_float32 = True
    lm = CausalLM.from_name(str(lm_dir))
    encoder = PromptedEncoder(lm, PROMPT, sharing="cascade")
    assert relative_error(encoder.encode(TEXTS), whole_prompts(lm_dir, TEXTS)) < 1e-5
    heads = lm.config.num_attention_heads
    assert set(kernel.groups) == {heads // getattr(lm.config, "num_key_value_heads", heads)}


def test_auto_takes_one_row_of_a_gpu_in_bfloat16(lm_dir, kernel, caplog):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir), dtype="bfloat16"), PROMPT)
    with caplog.at_level("WARNING", "pgra"):
        states = encoder.encode(TEXTS)
    assert encoder.way == "cascade"
    assert warnings_of(caplog) == []
    assert relative_error(states.float(), whole_prompts(lm_dir, TEXTS)) < 0.1


def test_what_the_kernel_refuses_is_told_with_the_cost_of_the_next_way(lm_dir, kernel, caplog):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir)), PROMPT)
    with caplog.at_level("WARNING", "pgra"):
        states = encoder.encode(TEXTS)
    assert encoder.way == "packed"
    refused, cost = warnings_of(caplog)
    assert "'cascade' does not work here: RuntimeError: FlashAttention only support fp16" in refused
    assert "'packed' costs a mask, and a copy of the prefix's" in cost
    assert relative_error(states, whole_prompts(lm_dir, TEXTS)) < 1e-4


@pytest.mark.gpu
def test_a_gpus_one_row_is_the_cpus_rows():
    lengths, device = [5, 2, 4], torch.device("cuda")
    rows = cascade.cascade_rows(3, device)
    layout = RowLayout.of(lengths, rows)
    spans = cascade.find_spans(layout, S, device)
    flat = draw(3, 1, HEADS, sum(lengths), WIDTH).to(torch.bfloat16)
    flat = [flat[0], flat[1][:, :KEY_HEADS], flat[2][:, :KEY_HEADS]]
    prefix = draw(2, 1, KEY_HEADS, S, WIDTH).to(torch.bfloat16)
    told = Cascade([tuple(prefix.to(device))] * 2, spans)
    found = (
        attend(LAYER, *(x.to(device) for x in flat), None, scaling=0.3, cascade=told)[0]
        .cpu()
        .float()
    )
    alone = Cascade(prepare_prefix([tuple(prefix.float())] * 2, HEADS))
    start = 0
    for length in lengths:
        part = [x[:, :, start : start + length].float() for x in flat]
        one = attend(LAYER, *part, None, scaling=0.3, cascade=alone)[0]
        torch.testing.assert_close(found[:, start : start + length], one, rtol=0.03, atol=0.03)
        start += length


@pytest.mark.gpu
@pytest.mark.parametrize("sharing", ["cascade", "packed", "expanded"])
def test_a_gpus_states_are_the_cpus(lm_dir, sharing):
    lm = CausalLM.from_name(str(lm_dir), dtype="bfloat16", device="cuda")
    states = PromptedEncoder(lm, PROMPT, sharing=sharing).encode(TEXTS)
    assert relative_error(states.float(), whole_prompts(lm_dir, TEXTS)) < 0.1
