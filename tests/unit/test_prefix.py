"""Prompted states: the shared prefix run once gives what the whole prompt gives."""

import functools

import pytest
import torch
from conftest import SENTENCES
from small_reranking import TEMPLATE, TRAIN, WORDS
from tiny_models import build_odd_lm
from transformers import AutoModel, AutoTokenizer

from pgra.errors import ConfigError, ModelError
from pgra.lm import kernels
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import WAYS, PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptFormat

PREFIX = (
    "Follow the demonstrations:\n"
    "Does the following sentence have a sentiment?\nA great film.\nThe answer is positive\n\n"
    "Does the following sentence have a sentiment?\nA dull plot.\nThe answer is negative"
)
PROMPT = FewShotPrompt(TEMPLATE, PREFIX)
TEXTS = [*SENTENCES, "a", "éa 中!", "x" * 90]


@functools.cache
def read_whole(folder, texts=tuple(TEXTS), prefix=PREFIX):
    """Equation 2 of the paper with nothing of ours: one unpadded prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = []
    for text in texts:
        body = f"Does the following sentence have a sentiment?\n{text}\nThe answer is"
        ids = tokenizer(f"{prefix}\n\n{body}" if prefix else body, return_tensors="pt")
        with torch.no_grad():
            states.append(model(input_ids=ids["input_ids"]).last_hidden_state[0, -1])
    return torch.stack(states)


def errors_of(states, folder, texts=TEXTS, prefix=PREFIX):
    """Return the distances to the states of whole prompts, relative to their lengths."""
    truth = read_whole(folder, tuple(texts), prefix)
    return (states.float() - truth).norm(dim=1) / truth.norm(dim=1)


def error_of(*args, **kwargs):
    return float(errors_of(*args, **kwargs).max())


def open_encoder(folder, prompt=PROMPT, *, dtype="auto", **options):
    return PromptedEncoder(CausalLM(str(folder), dtype=dtype), prompt, **options)


@pytest.fixture(scope="module")
def lm(lm_dir):
    return CausalLM(str(lm_dir))


def test_every_way_gives_the_states_of_whole_prompts(lm_dir):
    order = [5, 1, 14, 0, 3, 2, 4, 13, 6, 12, 11, 7, 9, 10, 8]
    for way, batch_tokens in zip((*WAYS, None), (70, 1, 512), strict=True):
        lm = CausalLM(str(lm_dir), batch_tokens=batch_tokens)
        lm.way = way
        encoder = PromptedEncoder(lm, PROMPT)
        states = encoder.encode([TEXTS[i] for i in order])[torch.tensor(order).argsort()]
        assert error_of(states, lm_dir) < 1e-4
    assert lm.way == "cascade"
    assert len(encoder.shared_ids) > 50
    assert lm.model.config._attn_implementation == "sdpa"  # as before
    assert encoder.encode([]).shape == (0, lm.width)
    assert lm.width == (16 if lm_dir.name == "opt-350m" else 32)  # which is projected
    bare = PromptedEncoder(lm, FewShotPrompt(TEMPLATE))  # shares the head of its template
    assert error_of(bare.encode(TEXTS), lm_dir, prefix="") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bloom", "gpt_neo"])
def test_an_odd_attention_takes_the_way_that_it_can(tmp_path, caplog, kind):
    """BLOOM counts places by the mask; behind others GPT-Neo's window loses the prefix."""
    folder = build_odd_lm(tmp_path, kind)
    encoder = open_encoder(folder)
    assert error_of(encoder.encode(TEXTS), folder) < 1e-4
    assert encoder.lm.way == "expanded"
    assert "shared by 'expanded'; 'cascade' does not work here" in caplog.text


def test_a_long_text_is_cut_in_the_text_and_counted(lm_dirs):
    encoder = open_encoder(lm_dirs["gpt2"], max_prompt_tokens=250)
    (ids,) = encoder.tokenize([{"text": "The film is warm. " * 100}]).ids
    assert encoder.num_cut == 1
    assert 240 < len(ids) <= 250
    assert encoder.lm.tokenizer.decode(ids).startswith(PREFIX)
    assert encoder.lm.tokenizer.decode(ids).endswith("\nThe answer is")
    with pytest.raises(ConfigError, match="64"):
        open_encoder(lm_dirs["opt"], max_prompt_tokens=64)


def test_a_state_that_is_not_finite_names_the_text(lm_dirs):
    encoder = open_encoder(lm_dirs["gpt2"])
    token = encoder.lm.tokenize(["中"])[0][0]
    encoder.lm.model.wte.weight.data[token] = float("nan")
    with pytest.raises(ModelError, match="中"):
        encoder.encode(["a", "中"])


def test_a_prefix_that_cannot_be_tokenised_apart_is_tokenised_whole(lm_dirs):
    prompt = FewShotPrompt(TEMPLATE, PREFIX + "\n")  # a break that merges with the blank line
    lm = CausalLM(str(lm_dirs["gpt2"]))
    lm.tokenizer.add_tokens(["\n\n\n"])
    lm.model.resize_token_embeddings(len(lm.tokenizer), mean_resizing=False)
    whole = [lm.tokenizer(prompt.prefix + prompt.suffix({"text": t}))["input_ids"] for t in TEXTS]
    assert PromptedEncoder(lm, prompt).tokenize([{"text": t} for t in TEXTS]).ids == whole


def flash_kernel(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, is_debug, **how):
    """FlashAttention-2 for many lengths as torch calls it on a GPU, with its demands, on a CPU."""
    if q.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for ends, longest, rows in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
        assert (ends.dtype, ends.dim(), ends.is_contiguous()) == (torch.int32, 1, True)
        assert (int(ends[0]), int(ends[-1]), int(ends.diff().max())) == (0, rows, longest)
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))  # (heads, T) float32
    repeats = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        own, seen = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        keys, values = (x[seen].repeat_interleave(repeats, 1).float() for x in (k, v))
        scale = q.shape[-1] ** -0.5 if how["scale"] is None else how["scale"]
        scores = torch.einsum("thd,shd->hts", q[own].float(), keys) * scale
        if is_causal:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool)
            scores = scores.masked_fill(~seen.tril(len(keys) - len(q[own])), -torch.inf)
        lse[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("hts,shd->thd", scores.softmax(-1), values).to(q.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def test_one_row_of_a_gpu_gives_the_states_of_whole_prompts(lm_dir, monkeypatch, caplog):
    """A GPU's way in cascade, on the CPU: one row, and the kernel of `varlen_attn` emulated."""
    monkeypatch.setattr(kernels, "takes_one_row", lambda device: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash_kernel, "CPU")
        encoder = open_encoder(lm_dir, dtype="bfloat16")
        assert error_of(encoder.encode(TEXTS), lm_dir) < 0.1
        half = open_encoder(lm_dir, dtype="float16")
        assert error_of(half.encode(TEXTS), lm_dir) < 0.1 / 8
        assert (encoder.lm.way, half.lm.way) == ("cascade", "cascade")
        assert "does not work here" not in caplog.text
        whole = open_encoder(lm_dir)
        whole.encode(TEXTS)
        assert whole.lm.way == "expanded"  # it takes no float32
    assert "(RuntimeError: FlashAttention only support fp16" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_gpus_states_are_the_cpus(lm_dir, way):
    lm = CausalLM(str(lm_dir), dtype="bfloat16", device="cuda")
    lm.way = way
    assert error_of(PromptedEncoder(lm, PROMPT).encode(TEXTS), lm_dir) < 0.1


CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    "{{ '' if enable_thinking else ' (no thought) ' }}"
)


@pytest.mark.parametrize("how", ["auto", "turns"])
def test_a_chat_is_written_whole_and_its_beginning_is_shared(lm_dirs, how):
    lm = CausalLM(str(lm_dirs["opt"]), device="cpu", dtype="float32")
    prompt = PromptFormat(TEMPLATE, WORDS).prompt(TRAIN[:2])
    with pytest.raises(ModelError, match="opt"):
        PromptedEncoder(lm, prompt, chat="turns")
    lm.tokenizer.chat_template = CHAT
    encoder = PromptedEncoder(lm, prompt, chat=how)
    whole = encoder.prompt.prefix + encoder.prompt.suffix({"text": "Cold."})
    gap = "\n[assistant] {}\n[user] " if how == "turns" else "\n{}\n\n"
    asked = [TEMPLATE.render({"text": text}) for text in (*(e.text for e in TRAIN[:2]), "Cold.")]
    shown = "".join(asked[i] + gap.format(f"The answer is {TRAIN[i].label}") for i in range(2))
    end = f"{asked[2]}\n[assistant] (no thought) The answer is"
    assert whole == f"[user] {TEMPLATE.instruction}{shown}{end}"
    states = encoder.encode(["Cold.", "A film by the sea."])
    alone = lm.states_of([lm.with_lead(lm.tokenize([whole])[0])])
    torch.testing.assert_close(states[:1], alone, rtol=1e-3, atol=1e-4)
    assert len(encoder.shared_ids) > len(lm.tokenize([encoder.prompt.prefix])[0]) - 4
