"""An LM on this machine: batches, shared beginnings and padding change nothing that it answers."""

import pytest
from conftest import LM_KINDS, SENTENCES, one_quick
from tiny_models import build_lm, build_odd_lm

from pgra.errors import ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.generate import PromptReader, next_logits

pytestmark = pytest.mark.slow

SHARED = f"Q: {SENTENCES[0]}\nA: sea\n\nQ: {SENTENCES[1]}\nA: actors\n\n"
PROMPTS = [SHARED + f"Q: {text}\nA:" for text in SENTENCES[2:7]] + ["Q: who?\nA:", SENTENCES[9]]
NO_STOP = {"max_new_tokens": 5, "stop": "no such text"}


def open_lm(folder, **changes):
    return CausalLM(str(folder), device="cpu", **changes)


def tokenize(lm, prompts):
    return [[*lm.lead_ids, *ids] for ids in lm.tokenize(prompts)]


def greedy(lm, prompt, count):
    """Whole prompts, no cache, no batch: the definition, up to the LM's own end."""
    (ids,), written = tokenize(lm, [prompt]), []
    while len(written) < count and not (written and written[-1] in lm.ends):
        written.append(int(next_logits(lm, [*ids, *written])[-1].argmax()))
    return written


def check_completions(lm, prompts, **how):
    found, done = [], []
    for prompt, completion in zip(
        prompts, lm.complete(prompts, **how, advance=done.append), strict=True
    ):
        written = greedy(lm, prompt, how["max_new_tokens"])
        text = lm.tokenizer.decode(written, skip_special_tokens=True)
        assert (completion.text, completion.num_new_tokens) == (text, len(written))
        assert completion.num_prompt_tokens == lm.count_tokens([prompt])[0]
        found.append(text)
    assert sum(done) == len(prompts)
    return found


def check_scores(lm, prompts, words):
    """Compare with the chances of all next tokens of whole texts, of words of many tokens too."""
    done, sizes = [], set()
    found = lm.score(prompts, words, advance=done.append)
    assert sum(done) == len(prompts)
    for prompt, values in zip(prompts, found, strict=True):
        (ids,) = tokenize(lm, [prompt])
        for word, value in zip(words, values, strict=True):
            tokens = tokenize(lm, [prompt + word])[0][len(ids) :]
            sizes.add(len(tokens))
            chances = next_logits(lm, [*ids, *tokens]).log_softmax(1)[len(ids) - 1 : -1]
            truth = float(chances[range(len(tokens)), tokens].sum())
            assert value == pytest.approx(truth, abs=2e-4)
    assert found[0] != found[1]
    assert min(sizes) == 1 < max(sizes)


@pytest.mark.parametrize("kind", one_quick(LM_KINDS, "opt"))
def test_completions_are_those_of_each_prompt_alone(kind, lm_dirs):
    lm = open_lm(lm_dirs[kind])
    found = check_completions(lm, PROMPTS, **NO_STOP)
    assert lm.complete([PROMPTS[0] + " It"], **NO_STOP)[0].text != found[0]  # the control
    check_scores(lm, PROMPTS[3:], [" great", " the old house"])


@pytest.mark.parametrize("kind", one_quick(["bloom", "gemma2", "mamba", "mistral"], "bloom"))
def test_other_kinds_of_attention_give_the_same_or_are_refused(kind, tmp_path):
    # ALiBi; a window shorter than the prompts in half of the layers, and capped logits; no keys at
    # all; a window in all layers.
    lm = open_lm(build_odd_lm(tmp_path / kind, kind))
    if kind == "mamba":
        with pytest.raises(ModelError):
            lm.score(PROMPTS[4:], [" great"])
        return
    check_completions(lm, PROMPTS[3:], **NO_STOP)
    check_scores(lm, PROMPTS[4:], [" great", " the old house"])


def test_stock_calls_and_sizes_of_what_is_kept_change_nothing(lm_dirs, monkeypatch):
    lm = open_lm(lm_dirs["llama"])
    expected = lm.complete(PROMPTS, **NO_STOP)
    for batch_tokens, kept_bytes in ((2048, 1 << 16), (40, 1 << 16)):
        monkeypatch.setattr("pgra.lm.generate.KEPT_BYTES", kept_bytes)
        lm.reader = PromptReader(lm, batch_tokens)
        assert lm.complete(PROMPTS, **NO_STOP) == expected
    monkeypatch.setenv("PGRA_FAST_KERNELS", "off")
    assert open_lm(lm_dirs["llama"]).complete(PROMPTS, **NO_STOP) == expected


def test_prompts_that_cannot_be_answered_are_refused(tmp_path):
    lm = open_lm(build_lm(tmp_path / "lm", "gpt2", window=64))
    with pytest.raises(ConfigError, match="prompt 2 .* 64"):
        lm.complete([PROMPTS[5], PROMPTS[0]], max_new_tokens=10, stop="\n")
    with pytest.raises(ConfigError, match="prompt 1"):
        lm.complete([""], max_new_tokens=1, stop="\n")
    assert lm.complete([], max_new_tokens=1, stop="\n") == []
    with pytest.raises(ModelError, match="'nswer is'"):
        lm.score(["The a"], ["nswer is"])
    lm.model.wte.weight.data[:] = float("inf")
    with pytest.raises(ModelError, match="torch.float32"):
        lm.complete(PROMPTS[5:6], max_new_tokens=1, stop="\n")
