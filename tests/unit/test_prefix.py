"""Prompted states: the shared prefix run once gives what the whole prompt gives."""

import functools
import weakref

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
from pgra.lm.batching import RowLayout, pack_rows
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import find_model, load_config, load_tokenizer
from pgra.lm.prefix import PromptedEncoder, SharedPrefix
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

TEMPLATE = PromptTemplate("Does the following sentence have a sentiment?\n{text}")
PREFIX = (
    "Follow the demonstrations:\n"
    "Does the following sentence have a sentiment?\nA great film.\nThe answer is positive\n\n"
    "Does the following sentence have a sentiment?\nA dull plot.\nThe answer is negative"
)
PROMPT = FewShotPrompt(TEMPLATE, PREFIX)
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
    assert relative_error(encoder.encode(TEXTS), whole_prompts(lm_dir, TEXTS)) < 1e-4


def test_weights_laid_out_for_many_tokens_change_the_last_digits_only(lm_dir, monkeypatch):
    encoder, seen = PromptedEncoder(CausalLM.from_name(str(lm_dir)), PROMPT), []
    parts = list(encoder.lm.model.modules())

    def look(_):
        seen.append(any("forward" in vars(part) for part in parts))

    encoder.encode(TEXTS, advance=look)
    assert not any(seen)
    monkeypatch.setattr("pgra.lm.kernels.MANY_TOKENS", 1)
    seen.clear()
    packed = encoder.encode(TEXTS, advance=look)
    assert relative_error(packed, whole_prompts(lm_dir, TEXTS)) < 1e-4
    has_linears = any(type(part) is torch.nn.Linear for part in parts)  # not GPT-2
    assert set(seen) == {has_linears}


def test_auto_shares_the_prefix_on_every_architecture(lm_dir):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir)), PROMPT)
    assert encoder.way == "cascade"
    assert encoder._behind.is_short
    assert len(encoder.shared_ids) > 50


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
    cascade, packed, cost = (r.getMessage() for r in caplog.records if r.name.startswith("pgra"))
    assert "'cascade' does not work here: ValueError: too many values" in cascade
    assert "'packed' does not work here: ValueError: too many values" in packed
    # Keys and values of two layers, 32 float32 each for a token.
    size = len(encoder.shared_ids) * 2 * 2 * 32 * 4 / 1e6
    assert (
        cost == f"'expanded' costs a mask, and a copy of the prefix's {size:.3g} MB for every text"
    )
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
    with pytest.raises(ModelError, match=r"\(it gives other states than the whole prompt\)"):
        encoder.encode(["a"])
    assert PromptedEncoder(lm, PROMPT).way == "none"


def test_an_lm_that_cannot_share_reads_whole_prompts(lm_dirs, wrong_states):
    wrong_states["off"] = 5.0
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["gpt2"])), PROMPT)
    assert relative_error(encoder.encode(TEXTS), whole_prompts(lm_dirs["gpt2"], TEXTS)) < 1e-4
    assert encoder.way == "none"


def test_another_word_in_the_prefix_moves_the_states(lm_dir):
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir)), PROMPT)
    other = whole_prompts(lm_dir, TEXTS, PREFIX.replace("negative", "positive"))
    assert relative_error(encoder.encode(TEXTS), other) > 1e-2


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


def test_rows_are_filled_in_order_and_a_long_text_stands_alone():
    assert pack_rows([9, 4, 3, 3, 1], 8) == [[0], [1, 2], [3, 4]]


def test_tokens_stand_where_the_layout_says():
    layout = RowLayout.of([2, 1, 3, 1], [[2], [0, 3, 1]])
    assert layout.place([[5, 6], [7], [8, 9, 10], [11]]).tolist() == [[8, 9, 10, 0], [5, 6, 11, 7]]
    assert layout.flat_ends.tolist() == [5, 7, 2, 6]


def test_a_token_sees_the_prefix_and_its_own_text_up_to_itself():
    layout = RowLayout.of([2, 1, 1], [[0, 1], [2]])
    assert layout.segments.tolist() == [[0, 0, 1], [2, -1, -1]]
    assert layout.positions.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert (layout.rows.tolist(), layout.ends.tolist()) == ([0, 0, 1], [1, 2, 0])
    seen = (layout.mask(1, torch.float32)[0, 0] == 0).int().tolist()
    assert seen == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]


def test_out_of_memory_halves_the_batch_and_lets_go_of_the_failed_one(
    lm_dirs, monkeypatch, tmp_path
):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path))
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT)
    truth = encoder.encode(TEXTS)
    run, sizes, held = PromptedEncoder._run, [], []

    def small_memory(self, prompts):
        sizes.append(len(prompts))
        assert all(ref() is None for ref in held)
        if len(prompts) > 4:
            tensor = torch.zeros(3)
            held.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("too small")
        return run(self, prompts)

    monkeypatch.setattr(PromptedEncoder, "_run", small_memory)
    torch.testing.assert_close(encoder.encode(TEXTS), truth, rtol=1e-4, atol=1e-4)
    assert max(sizes) > 4
    sizes.clear()
    encoder.encode(TEXTS)
    assert max(sizes) < len(TEXTS)  # the smaller budget is remembered,
    fresh = PromptedEncoder(encoder.lm, PROMPT)
    assert fresh._budget == encoder._budget < 512  # also by the next run,
    assert PromptedEncoder(encoder.lm, PROMPT, sharing="none")._budget == 512  # for this way only
    monkeypatch.setattr(PromptedEncoder, "_run", _never)
    with pytest.raises(ModelError, match=r"one text of \d+ tokens does not fit the memory of cpu"):
        encoder.encode(["a"])


def test_after_a_back_off_no_batch_fails_again(lm_dirs, monkeypatch, tmp_path):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path))
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT, batch_tokens=400)
    truth = encoder.encode(TEXTS * 4)
    run, failed = PromptedEncoder._run, []

    def small_memory(self, prompts):
        own = sum(len(ids) - len(self.shared_ids) for ids in prompts)
        if own > 250:
            failed.append(own)
            raise torch.OutOfMemoryError("too small")
        return run(self, prompts)

    monkeypatch.setattr(PromptedEncoder, "_run", small_memory)
    torch.testing.assert_close(encoder.encode(TEXTS * 4), truth, rtol=1e-4, atol=1e-4)
    assert len(failed) == 1


def test_a_small_batch_that_does_not_fit_is_no_budget_for_later_runs(
    lm_dirs, monkeypatch, tmp_path
):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path))
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT, batch_tokens=400)
    run, fails = PromptedEncoder._run, [1]

    def short_for_a_moment(self, prompts):
        if fails and len(prompts) > 1:
            fails.pop()
            raise torch.OutOfMemoryError("too small")
        return run(self, prompts)

    def budgets():
        again = PromptedEncoder(encoder.lm, PROMPT, batch_tokens=400)
        return encoder._budget, again._budget

    monkeypatch.setattr(PromptedEncoder, "_run", short_for_a_moment)
    tail = ["a", "b", "c"]
    encoder.encode(tail)
    assert budgets()[0] < 40  # nothing larger fitted so far: this run goes on with less,
    assert budgets()[1] == 400  # a later one does not
    encoder = PromptedEncoder(encoder.lm, PROMPT, batch_tokens=400)
    truth = encoder.encode(TEXTS * 4)
    fails.append(1)
    encoder.encode(tail)
    assert (fails, budgets()) == ([], (400, 400))  # larger ones fitted: nothing is learned
    fails.append(1)
    encoder.encode(tail)
    assert budgets()[0] < 40  # but from the second time on
    encoder = PromptedEncoder(encoder.lm, PROMPT, batch_tokens=400)
    fails.append(1)
    torch.testing.assert_close(encoder.encode(TEXTS * 4), truth, rtol=1e-4, atol=1e-4)
    assert 40 < budgets()[0] == budgets()[1] < 400  # the control: a full batch is remembered


def test_a_way_that_does_not_fit_memory_gives_way_to_the_next(lm_dirs, monkeypatch):
    run = SharedPrefix.run

    def no_cascade(self, own, way):
        if way == "cascade":
            raise torch.OutOfMemoryError("too small")
        return run(self, own, way)

    monkeypatch.setattr(SharedPrefix, "run", no_cascade)
    assert PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), PROMPT).way == "packed"


def _never(*_):
    raise torch.OutOfMemoryError("too small")
