"""Prompted states: the shared prefix run once gives what the whole prompt gives."""

import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import SENTENCES
from tiny_models import _lively, build_encoder, build_lm, build_t5
from transformers import (
    AutoModel,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
)

from pgra.errors import ConfigError, ModelError
from pgra.lm import kernels
from pgra.lm.batching import RowLayout
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import find_model, load_config, load_tokenizer
from pgra.lm.prefix import WAYS, PromptedEncoder, SharedPrefix
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

TEMPLATE = PromptTemplate("Does the following sentence have a sentiment?\n{text}")
PREFIX = (
    "Follow the demonstrations:\n"
    "Does the following sentence have a sentiment?\nA great film.\nThe answer is positive\n\n"
    "Does the following sentence have a sentiment?\nA dull plot.\nThe answer is negative"
)
PROMPT = FewShotPrompt(TEMPLATE, PREFIX)
LAYER = SimpleNamespace(layer_idx=1, is_causal=True)
HEADS, KEY_HEADS, WIDTH, S = 4, 2, 8, 11
TEXTS = [*SENTENCES, "a", "éa 中!", "x" * 90]


def whole_prompts(folder, texts, prefix=PREFIX):
    return read_whole(folder, tuple(texts), prefix).clone()


@functools.cache
def read_whole(folder, texts, prefix):
    """Equation 2 of the paper with nothing of ours: one unpadded prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = []
    for text in texts:
        body = f"Does the following sentence have a sentiment?\n{text}\nThe answer is"
        prompt = f"{prefix}\n\n{body}" if prefix else body
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states.append(model(input_ids=ids).last_hidden_state[0, -1])
    return torch.stack(states)


def relative_error(states, truth):
    return float(((states - truth).norm(dim=1) / truth.norm(dim=1)).max())


@pytest.mark.parametrize("sharing", ["cascade", "packed", "expanded", "none", "auto"])
def test_shared_prefix_equals_whole_prompt(lm_dir, sharing):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir)), PROMPT, sharing=sharing)
    states = encoder.encode(TEXTS)
    assert relative_error(states, whole_prompts(lm_dir, TEXTS)) < 1e-4
    other = whole_prompts(lm_dir, TEXTS, PREFIX.replace("negative", "positive"))
    assert relative_error(states, other) > 1e-2  # the control


def test_kernels_on_or_off_give_whole_prompts(lm_dir, fast_kernels, monkeypatch):
    monkeypatch.setattr("pgra.lm.kernels.MANY_TOKENS", 1)  # weights are laid out for oneDNN
    lm = CausalLM.from_name(str(lm_dir))
    encoder = PromptedEncoder(lm, PROMPT)
    assert relative_error(encoder.encode(TEXTS), whole_prompts(lm_dir, TEXTS)) < 1e-4
    assert encoder.way == ("cascade" if fast_kernels == "auto" else "packed")
    assert len(encoder.shared_ids) > 50
    assert lm.model.config._attn_implementation == "sdpa"  # as before
    forced = PromptedEncoder(lm, PROMPT, sharing="cascade")
    if fast_kernels == "off":
        with pytest.raises(ModelError, match=r"does not work on .* \(--fast_kernels is off\)"):
            forced.encode(TEXTS)


def test_states_of_prompts_are_those_of_the_contract(lm_dir):
    lm = CausalLM.from_name(str(lm_dir), batch_tokens=200)
    states = lm.states(TEXTS)
    alone = torch.cat([lm.states([text]) for text in TEXTS])
    torch.testing.assert_close(states, alone, rtol=1e-4, atol=1e-4)
    assert lm.states([]).shape == (0, lm.width)


def test_an_attention_that_looks_back_only_so_far_is_not_packed(tmp_path):
    """In a row, another text's tokens would stand between a text and the prefix."""
    folder = build_lm(tmp_path, "gpt2")
    tokens = len(AutoTokenizer.from_pretrained(folder))
    config = GPTNeoConfig(
        vocab_size=tokens,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=512,
        attention_types=[[["global", "local"], 1]],
        window_size=32,
    )
    _lively(GPTNeoForCausalLM(config)).save_pretrained(folder)
    encoder = PromptedEncoder(CausalLM.from_name(str(folder)), PROMPT)
    assert encoder.way == "expanded"
    assert relative_error(encoder.encode(TEXTS), whole_prompts(folder, TEXTS)) < 1e-4


def test_an_lm_that_counts_places_by_the_mask_gets_a_row_a_text(tmp_path, caplog):
    """BLOOM's ALiBi; a mask of four axes is none that it can count by."""
    folder = build_lm(tmp_path, "gpt2")
    tokens = len(AutoTokenizer.from_pretrained(folder))
    config = BloomConfig(vocab_size=tokens, hidden_size=32, n_layer=2, n_head=4)
    _lively(BloomForCausalLM(config)).save_pretrained(folder)
    lm = CausalLM.from_name(str(folder))
    encoder = PromptedEncoder(lm, PROMPT)
    with caplog.at_level("WARNING", "pgra"):
        assert encoder.way == "expanded"
    *_, warning = (r.getMessage() for r in caplog.records if r.name == "pgra.lm.prefix")
    # Keys and values of two layers, 32 float32 each for a token.
    size = len(encoder.shared_ids) * 2 * 2 * 32 * 4 / 1e6
    cost = f"'expanded' costs a mask, and a copy of the prefix's {size:.3g} MB for every text"
    reason = "does not work here (ValueError: too many values"
    assert warning.startswith(f"{cost}: 'cascade' {reason}")
    assert f"'packed' {reason}" in warning
    assert relative_error(encoder.encode(TEXTS), whole_prompts(folder, TEXTS)) < 1e-4
    why = r"'cascade' does not work on '.*' \(ValueError: too many values .*\): use auto or none"
    with pytest.raises(ModelError, match=why):
        PromptedEncoder(lm, PROMPT, sharing="cascade").encode(["a"])


@pytest.fixture
def wrong_states(monkeypatch):
    """Every way's states lie off by a share of what each text has of its own."""
    run, share = SharedPrefix.run, {"off": 0.0}

    def lie(self, own, way):
        states = run(self, own, way).float()
        states += share["off"] * (states - states.mean(0)).norm(dim=1, keepdim=True) / 32**0.5
        return states.to(self.lm.dtype)

    monkeypatch.setattr(SharedPrefix, "run", lie)
    return share


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_way_that_errs_by_half_of_what_a_text_has_of_its_own_is_refused(
    lm_dirs, wrong_states, dtype
):
    lm = CausalLM.from_name(str(lm_dirs["opt"]), dtype=dtype)
    # As in real LMs, a large common part: half of a text's own is less than 5 % of its length.
    lm.model.decoder.final_layer_norm.bias.data += 4
    assert PromptedEncoder(lm, PROMPT).way == "cascade"  # the control: it does not lie yet
    wrong_states["off"] = 0.5
    encoder = PromptedEncoder(lm, PROMPT, sharing="cascade")
    with pytest.raises(ModelError, match=r"\(it gives other values than the stock way\)"):
        encoder.encode(["a"])
    assert PromptedEncoder(lm, PROMPT).way == "none"


def test_an_lm_that_cannot_share_reads_whole_prompts(lm_dirs, wrong_states):
    wrong_states["off"] = 5.0
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["gpt2"])), PROMPT)
    assert relative_error(encoder.encode(TEXTS), whole_prompts(lm_dirs["gpt2"], TEXTS)) < 1e-4
    assert encoder.way == "none"


@pytest.mark.parametrize("batch_tokens", [1, 70, 4096])
def test_batch_size_and_order_change_nothing(lm_dir, batch_tokens):
    lm = CausalLM.from_name(str(lm_dir))
    encoder = PromptedEncoder(lm, PROMPT, batch_tokens=batch_tokens)
    order = [5, 1, 14, 0, 3, 2, 4, 13, 6, 12, 11, 7, 9, 10, 8]
    shuffled = encoder.encode([TEXTS[i] for i in order])
    assert relative_error(shuffled, whole_prompts(lm_dir, TEXTS)[order]) < 1e-4


def test_a_prompt_without_exemplars_shares_the_head_of_its_template(lm_dir):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir)), FewShotPrompt(TEMPLATE))
    assert relative_error(encoder.encode(TEXTS), whole_prompts(lm_dir, TEXTS, "")) < 1e-4


def test_no_text_gives_no_state(lm_dirs):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT)
    assert encoder.encode([]).shape == (0, 32)


def test_opt_350m_states_are_projected(lm_dirs):
    assert CausalLM.from_name(str(lm_dirs["opt-350m"])).width == 16


def test_a_long_text_is_cut_in_the_text_and_counted(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["gpt2"]))
    encoder = PromptedEncoder(lm, PROMPT, max_prompt_tokens=250)
    long = "The film is warm. " * 100
    states = encoder.encode(["a", long])
    assert encoder.num_cut == 1
    ids = encoder._prompt_ids(encoder._cut({"text": long}))
    assert 240 < len(ids) <= 250
    tail = lm.tokenize(["\nThe answer is"])[0]
    assert ids[-len(tail) :] == tail
    assert lm.tokenizer.decode(ids).endswith("\nThe answer is")
    assert relative_error(states[:1], whole_prompts(lm_dirs["gpt2"], ["a"])) < 1e-4


def test_a_prefix_over_the_window_is_refused_with_its_tokens(tmp_path):
    lm = CausalLM.from_name(str(build_lm(tmp_path, "opt", window=64)))
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens .* may read 64: use fewer"):
        PromptedEncoder(lm, PROMPT)


def test_a_limit_over_the_window_is_refused(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["opt"]))
    with pytest.raises(ConfigError, match=r"max_prompt_tokens is 9999, .* at most 512"):
        PromptedEncoder(lm, PROMPT, max_prompt_tokens=9999)


def test_a_state_that_is_not_finite_names_the_text(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["gpt2"]))
    encoder = PromptedEncoder(lm, PROMPT)
    token = lm.tokenize(["中"])[0][0]
    lm.model.wte.weight.data[token] = float("nan")
    with pytest.raises(ModelError, match=r"no finite state in torch.float32 for 1 of 2 texts.*中"):
        encoder.encode(["a", "中"])


def test_an_encoder_is_no_causal_lm(tmp_path):
    name = str(build_encoder(tmp_path, "bert"))
    with pytest.raises(ModelError, match="is a bert, not a causal LM"):
        CausalLM.from_name(name)


def test_a_model_whose_later_tokens_change_earlier_states_is_no_causal_lm(tmp_path):
    source = find_model(str(build_encoder(tmp_path, "bert")))
    config, tokenizer = load_config(source), load_tokenizer(source)
    lm = CausalLM(source, config, tokenizer, torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match="is not a causal LM: a later token changes"):
        lm.states_of([[5, 6]])


def test_an_encoder_decoder_is_no_causal_lm(tmp_path):
    with pytest.raises(ModelError, match="is an encoder-decoder"):
        CausalLM.from_name(str(build_t5(tmp_path)))


def test_bfloat16_states_are_near_float32_ones(lm_dirs):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["llama"]), dtype="bfloat16"), PROMPT)
    states = encoder.encode(SENTENCES)
    assert states.dtype == torch.bfloat16
    assert relative_error(states.float(), whole_prompts(lm_dirs["llama"], SENTENCES)) < 0.1


def test_a_prefix_that_cannot_be_tokenised_apart_is_tokenised_whole(lm_dirs):
    prompt = FewShotPrompt(TEMPLATE, PREFIX + "\n")  # a break that merges with the blank line
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["gpt2"])), prompt)
    encoder.lm.tokenizer.add_tokens(["\n\n\n"])
    encoder.lm.model.resize_token_embeddings(len(encoder.lm.tokenizer), mean_resizing=False)
    assert not PromptedEncoder(encoder.lm, prompt)._splits_cleanly
    states = PromptedEncoder(encoder.lm, prompt, sharing="packed").encode(SENTENCES)
    truth = [
        encoder.lm.states_of(
            [encoder.lm.tokenizer(prompt.prefix + prompt.suffix({"text": text}))["input_ids"]]
        )[0]
        for text in SENTENCES
    ]
    assert relative_error(states, torch.stack(truth)) < 1e-4


@pytest.fixture
def small_memory(lm_dirs, monkeypatch, tmp_path):
    """An encoder whose device holds 250 own tokens, with the truth of four times the texts."""
    monkeypatch.setenv("PGRA_HOME", str(tmp_path))
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT, batch_tokens=400)
    truth = encoder.encode(TEXTS * 4)
    run, failed, held = SharedPrefix.run, [], []

    def run_if_it_fits(self, texts, way):
        assert all(ref() is None for ref in held)  # nothing is left of a failed attempt
        if sum(map(len, texts)) > 250 and len(texts) > 1:
            tensor = torch.zeros(3)
            held.append(weakref.ref(tensor))
            failed.append(len(texts))
            raise torch.OutOfMemoryError("too small")
        return run(self, texts, way)

    monkeypatch.setattr(SharedPrefix, "run", run_if_it_fits)
    return encoder, truth, failed


def test_out_of_memory_halves_the_batch_and_no_later_one_fails(small_memory):
    encoder, truth, failed = small_memory
    torch.testing.assert_close(encoder.encode(TEXTS * 4), truth, rtol=1e-4, atol=1e-4)
    assert len(failed) == 1
    encoder.encode(TEXTS * 4)
    later = PromptedEncoder(encoder.lm, PROMPT, batch_tokens=400)  # as of the next run
    torch.testing.assert_close(later.encode(TEXTS * 4), truth, rtol=1e-4, atol=1e-4)
    assert len(failed) == 1


def test_a_text_that_does_not_fit_alone_is_refused(lm_dirs, monkeypatch, tmp_path):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path))
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT)
    encoder.encode(["a"])

    def never(*_):
        raise torch.OutOfMemoryError("too small")

    monkeypatch.setattr(SharedPrefix, "run", never)
    with pytest.raises(ModelError, match=r"one text of \d+ tokens does not fit the memory of cpu"):
        encoder.encode(["a"])


def test_a_way_that_does_not_fit_memory_gives_way_to_the_next(lm_dirs, monkeypatch):
    run = SharedPrefix.run

    def no_cascade(self, own, way):
        if way == "cascade":
            raise torch.OutOfMemoryError("too small")
        return run(self, own, way)

    monkeypatch.setattr(SharedPrefix, "run", no_cascade)
    assert PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT).way == "packed"


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
    monkeypatch.setattr(kernels, "takes_one_row", lambda device: True)
    if request.param == "2.11":
        old = functools.partial(varlen_of_torch_211, kernel)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old)
        yield kernel
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", kernel, "CPU")
        yield kernel


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
    assert not [r for r in caplog.records if r.name.startswith("pgra")]
    assert relative_error(states.float(), whole_prompts(lm_dir, TEXTS)) < 0.1
    refused = PromptedEncoder(CausalLM.from_name(str(lm_dir)), PROMPT)  # it takes no float32
    with caplog.at_level("WARNING", "pgra"):
        assert refused.way == "packed"
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("pgra")]
    assert "(RuntimeError: FlashAttention only support fp16" in warning


@pytest.mark.gpu
def test_a_gpus_one_row_is_the_cpus_rows():
    lengths, device = [5, 2, 4], torch.device("cuda")
    rows = kernels.cascade_rows(3, device)
    layout = RowLayout.of(lengths, rows)
    spans = kernels.find_spans(layout, S, device)
    flat = torch.randn(3, 1, HEADS, sum(lengths), WIDTH).to(torch.bfloat16)
    flat = [flat[0], flat[1][:, :KEY_HEADS], flat[2][:, :KEY_HEADS]]
    prefix = torch.randn(2, 1, KEY_HEADS, S, WIDTH).to(torch.bfloat16)
    told = kernels.Cascade([tuple(prefix.to(device))] * 2, spans)
    found = (
        kernels.attend(LAYER, *(x.to(device) for x in flat), None, scaling=0.3, cascade=told)[0]
        .cpu()
        .float()
    )
    alone = kernels.Cascade(kernels.prepare_prefix([tuple(prefix.float())] * 2, HEADS))
    start = 0
    for length in lengths:
        part = [x[:, :, start : start + length].float() for x in flat]
        one = kernels.attend(LAYER, *part, None, scaling=0.3, cascade=alone)[0]
        torch.testing.assert_close(found[:, start : start + length], one, rtol=0.03, atol=0.03)
        start += length


@pytest.mark.gpu
@pytest.mark.parametrize("sharing", ["cascade", "packed", "expanded"])
def test_a_gpus_states_are_the_cpus(lm_dir, sharing):
    lm = CausalLM.from_name(str(lm_dir), dtype="bfloat16", device="cuda")
    states = PromptedEncoder(lm, PROMPT, sharing=sharing).encode(TEXTS)
    assert relative_error(states.float(), whole_prompts(lm_dir, TEXTS)) < 0.1
