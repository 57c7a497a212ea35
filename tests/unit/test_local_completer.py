"""An LM on this machine: batches, shared beginnings and padding change nothing that it answers."""

import math

import pytest
import torch
from conftest import LM_KINDS, SENTENCES
from tiny_models import _lively, build_lm
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from pgra.errors import ConfigError, ModelError
from pgra.lm.generate import (
    BatchReader,
    GreedyDecoder,
    Shelf,
    chance_alone,
    join,
    next_logits,
    write_alone,
)
from pgra.lm.kernels import LastLayer
from pgra.lm.local import LocalCompleter

SHARED = f"Q: {SENTENCES[0]}\nA: sea\n\nQ: {SENTENCES[1]}\nA: actors\n\n"
PROMPTS = [SHARED + f"Q: {text}\nA:" for text in SENTENCES[2:7]] + ["Q: who?\nA:", SENTENCES[9]]


def build_odd_lm(folder, kind):
    """Write a tiny LM of a rarer kind, with GPT-2's tokens."""
    build_lm(folder, "gpt2")
    tokens = {"vocab_size": completer(folder).lm.config.vocab_size, "eos_token_id": 1}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = {**size, "num_key_value_heads": 2, "intermediate_size": 64, "sliding_window": 16}
    config, model = {
        "bloom": (BloomConfig(**tokens, hidden_size=32, n_layer=2, n_head=4), BloomForCausalLM),
        "gemma2": (Gemma2Config(**tokens, **wide, head_dim=8), Gemma2ForCausalLM),
        "mistral": (MistralConfig(**tokens, **wide), MistralForCausalLM),
        "mamba": (
            MambaConfig(**tokens, hidden_size=16, num_hidden_layers=1, state_size=4),
            MambaForCausalLM,
        ),
    }[kind]
    _lively(model(config)).save_pretrained(folder)
    return folder


def completer(folder, **changes):
    return LocalCompleter.from_name(str(folder), device="cpu", **changes)


def greedy(local, prompt, count):
    """Whole prompts, no cache, no batch: the definition."""
    ids = [*local.lm.lead_ids, *local.lm.tokenize([prompt])[0]]
    written = []
    for _ in range(count):
        written.append(int(next_logits(local.lm, [*ids, *written])[-1].argmax()))
    return written


@pytest.mark.parametrize("kind", LM_KINDS)
def test_completions_are_those_of_each_prompt_alone(kind, lm_dirs):
    local = completer(lm_dirs[kind])
    assert local._reader.reader.fault is None
    done = []
    found = local.complete(PROMPTS, max_new_tokens=5, stop="no such text", advance=done.append)
    ends = local._ends
    for prompt, completion in zip(PROMPTS, found, strict=True):
        written = greedy(local, prompt, 5)
        end = next((i + 1 for i, token in enumerate(written) if token in ends), 5)
        assert completion.text == local._text(written[:end])
        assert completion.num_new_tokens == end
        assert completion.num_prompt_tokens == local.count_tokens([prompt])[0]
    assert sum(done) == len(PROMPTS)
    other = local.complete([PROMPTS[0] + " It"], max_new_tokens=5, stop="no such text")  # control
    assert other[0].text != found[0].text


def test_size_of_batches_and_of_what_is_kept_changes_nothing(lm_dirs):
    whole = completer(lm_dirs["llama"])
    ids = whole._tokenize(PROMPTS)

    def write(**changes):
        decoder = GreedyDecoder(BatchReader(whole.lm, **changes))
        return decoder.write(ids, max_new_tokens=6, is_done=lambda tokens: len(tokens) > 4)

    expected = write()
    assert {len(tokens) for tokens in expected} == {5}
    for kept_bytes in (1, 1 << 16, 1 << 20):
        assert write(batch_tokens=40, kept_bytes=kept_bytes) == expected
    assert write_alone(whole.lm, ids, max_new_tokens=5, is_done=lambda _: False) == expected


def test_memory_of_earlier_calls_leaves_no_trace(lm_dirs):
    local = completer(lm_dirs["llama"])

    def write(one, prompts):
        found = one.complete(prompts, max_new_tokens=6, stop="no such text")
        return [completion.text for completion in found]

    places = set()
    for prompts in (PROMPTS[5:], PROMPTS, PROMPTS[1:4], PROMPTS[::-1]):
        assert write(local, prompts) == write(completer(lm_dirs["llama"]), prompts)
        places.add(local._reader.shelf(1)._flat[0, 0].data_ptr())
    assert len(places) == 2  # the first, and what all prompts need


def test_shared_beginnings_are_read_once(lm_dirs):
    local = completer(lm_dirs["opt"])
    local.complete(PROMPTS[:5], max_new_tokens=1, stop="\n")
    shared, lengths = local.count_tokens([SHARED + "Q:"])[0], local.count_tokens(PROMPTS[:5])
    assert local.num_tokens == sum(lengths) - 4 * shared
    before = local.num_tokens
    local.complete(PROMPTS[5:], max_new_tokens=1, stop="\n")  # the control: nothing in common
    assert local.num_tokens - before == sum(local.count_tokens(PROMPTS[5:]))


def test_a_prompt_that_grows_is_read_once_and_answered_as_alone(lm_dirs):
    local, alone = completer(lm_dirs["opt"]), completer(lm_dirs["opt"])
    grown = SHARED
    for more in ("", "A: red\n\n", "A: blue\n\n"):
        grown += more
        prompts = [grown + end for end in ("Q: one", "Q: two three")]
        before, unread = local.num_tokens, local._reader.count_unread(local._tokenize(prompts))
        told = local.complete(prompts, max_new_tokens=3, stop="\n\n\n")
        assert local.num_tokens - before == unread
        assert [c.text for c in told] == [
            alone.complete([p], max_new_tokens=3, stop="\n\n\n")[0].text for p in prompts
        ]
        if more:
            assert unread < alone.count_tokens([SHARED])[0]
    cut = [SHARED[: len(SHARED) // 2] + end for end in ("X", "Y")]  # the control: less in common
    told = local.complete(cut, max_new_tokens=3, stop="\n\n\n")
    assert [c.text for c in told] == [
        alone.complete([p], max_new_tokens=3, stop="\n\n\n")[0].text for p in cut
    ]


def test_what_is_kept_bounds_a_batch_however_short_its_own_tokens(lm_dirs):
    whole = completer(lm_dirs["opt"])
    ids = whole._tokenize(PROMPTS[:5])
    rows = {}
    for room in (1, 2, 100):
        reader = BatchReader(whole.lm, kept_bytes=1)
        longest = max(map(len, ids)) + 64
        reader.kept_bytes = room * longest * reader.reader.token_bytes
        rows[room] = [len(batch.rows) for batch in reader.batches(ids)]
    assert rows == {1: [1] * 5, 2: [2, 2, 1], 100: [5]}


def test_a_prompt_that_is_done_leaves_the_batch(lm_dirs, monkeypatch):
    local = completer(lm_dirs["gpt2"])
    ids = local._tokenize(PROMPTS[:4])
    seen = []
    step = local._reader.reader.step

    def watched(kept, tokens):
        seen.append(len(tokens))
        return step(kept, tokens)

    monkeypatch.setattr(local._reader.reader, "step", watched)
    lengths = iter([1, 3, 9, 9])
    wanted = {}

    def is_done(tokens):
        key = tuple(tokens[:1])
        wanted.setdefault(key, next(lengths, 9))
        return len(tokens) >= wanted[key]

    written = GreedyDecoder(local._reader).write(ids, max_new_tokens=6, is_done=is_done)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < len(ids)
    assert sum(seen) >= sum(len(tokens) - 1 for tokens in written)


def test_what_is_written_goes_into_the_room_and_nothing_is_copied(lm_dirs):
    local = completer(lm_dirs["llama"])
    reader, ids = local._reader.reader, local._tokenize(PROMPTS[:3])
    blocks = [reader.read(ids[:2]), reader.read(ids[2:])]
    tight, roomy = join(blocks), join(blocks, room=2)
    places = []
    for tokens in ([3, 4, 5], [6, 7, 8], [9, 3, 4]):
        tight, roomy = (reader.step(kept, tokens) for kept in (tight, roomy))
        torch.testing.assert_close(roomy.logits, tight.logits, atol=1e-5, rtol=1e-5)
        places.append(roomy.layers[0][0].data_ptr())
    assert places[0] == places[1] != places[2]  # the third has no room
    assert (roomy.room, roomy.longest) == (0, tight.longest)
    left = join(blocks, room=2).take([2, 0])
    assert (left.room, left.longest) == (2, join(blocks).longest)
    torch.testing.assert_close(
        reader.go_on(left, [[3], [4]]), reader.go_on(join(blocks).take([2, 0]), [[3], [4]])
    )


def test_prompts_joined_on_a_shelf_again_and_again_are_those_of_new_memory(lm_dirs):
    local = completer(lm_dirs["llama"])
    reader, ids = local._reader.reader, local._tokenize(PROMPTS[:4])
    first, second = ([reader.read(ids[:2]), reader.read([ids[2]])], [reader.read([ids[3]])])
    shelf = Shelf()
    shelf.expect(4 * (max(map(len, ids)) + 6))
    laid, plain = join(first, room=3, shelf=shelf), join(first, room=3)
    place = laid.layers[0][0].data_ptr()
    laid, plain = reader.step(laid, [3, 4, 5]), reader.step(plain, [3, 4, 5])
    laid, plain = laid.keep([0, 2]), plain.take([0, 2])  # moved, and copied
    for one, other in zip(laid.layers, plain.layers, strict=True):
        used = [[part[:, :, : laid.longest] for part in layer] for layer in (one, other)]
        torch.testing.assert_close(*used)
    laid = join([*second, laid], room=3, shelf=shelf)
    plain = join([*second, plain], room=3)
    assert laid.layers[0][0].data_ptr() == place != plain.layers[0][0].data_ptr()
    assert laid.lengths.tolist() == plain.lengths.tolist()
    ends = [reader.step(kept, [6, 7, 8]) for kept in (laid, plain)]
    torch.testing.assert_close(ends[0].logits, ends[1].logits)
    assert not torch.allclose(ends[0].logits[1], ends[0].logits[2])
    small = Shelf()
    join(second, room=1, shelf=small)  # more than it holds takes a larger one
    torch.testing.assert_close(
        reader.go_on(join([*first, *second], shelf=small), [[3]] * 4),
        reader.go_on(join([*first, *second]), [[3]] * 4),
    )


def test_the_last_layer_works_on_last_tokens_only_unless_that_changes_something(
    lm_dirs, monkeypatch
):
    local = completer(lm_dirs["llama"])
    reader, ids = local._reader.reader, local._tokenize(PROMPTS[:3])
    assert reader.fault is None
    seen = []
    for layer in local.lm.model.layers:
        count = lambda _, args: seen.append(args[0].shape[:-1].numel())  # noqa: E731
        layer.mlp.down_proj.register_forward_pre_hook(count)
    trimmed = reader.read(ids)
    assert seen[-1] == 3 < seen[0] == 3 * max(map(len, ids))
    reader._is_trimmed = False
    whole = reader.read(ids)
    assert seen[-1] == seen[0]
    torch.testing.assert_close(trimmed.logits, whole.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(trimmed.layers[-1], whole.layers[-1])
    # An LM whose last layer looks at other tokens there is read whole, and is no fault.
    other = completer(lm_dirs["llama"])._reader.reader
    monkeypatch.setattr(other._last, "only_at", lambda ends: only_first(other, ends))
    assert other.fault is None
    assert not other._is_trimmed


def only_first(reader, ends):
    """The last layer where it is not wanted."""
    return LastLayer.only_at(reader._last, None if ends is None else ends * 0)


def test_text_ends_before_the_stop_string(lm_dirs):
    local = completer(lm_dirs["qwen2"])
    whole = local.complete(PROMPTS[:3], max_new_tokens=8, stop="no such text")
    for prompt, free in zip(PROMPTS[:3], whole, strict=True):
        stop = free.text[2:4]
        cut = local.complete([prompt], max_new_tokens=8, stop=stop)[0]
        assert cut.text == free.text.split(stop)[0]
        assert 1 <= cut.num_new_tokens <= free.num_new_tokens


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt"])
def test_scores_are_the_chances_of_all_of_a_words_tokens(kind, lm_dirs):
    local = completer(lm_dirs[kind], batch_tokens=60)
    words = [" great", " terrible", " no", " the old house"]
    done = []
    found = local.score(PROMPTS, words, advance=done.append)
    assert sum(done) == len(PROMPTS)
    sizes = set()
    for prompt, values in zip(PROMPTS, found, strict=True):
        ids = local._tokenize([prompt])[0]
        for word, value in zip(words, values, strict=True):
            tokens = local._tokenize([prompt + word])[0][len(ids) :]
            sizes.add(len(tokens))
            assert value == pytest.approx(chance_alone(local.lm, ids, tokens), abs=2e-4)
    assert min(sizes) == 1 < max(sizes)
    assert found[0] != found[1]


def test_the_chances_of_all_next_tokens_sum_to_one(lm_dirs):
    local = completer(lm_dirs["gpt2"])
    vocabulary = [[token] for token in range(len(local.lm.tokenizer))]
    ids = local._tokenize(PROMPTS[:1])[0]
    from pgra.lm.generate import word_chances

    kept = local._reader.reader.read([ids])
    values = word_chances(local._reader.reader, kept, [vocabulary])[0]
    assert sum(map(math.exp, values)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("kind", ["bloom", "gemma2", "mistral"])
def test_other_kinds_of_attention_give_the_same(kind, tmp_path):
    # ALiBi; a window shorter than the prompts in half of the layers, and capped logits; in all.
    local = completer(build_odd_lm(tmp_path / kind, kind))
    assert local._reader.reader.fault is None
    assert (local._reader.reader._head is None) == (kind == "gemma2")
    found = local.complete(PROMPTS[1:4], max_new_tokens=3, stop="no such text")
    for prompt, completion in zip(PROMPTS[1:4], found, strict=True):
        assert completion.text == local._text(greedy(local, prompt, completion.num_new_tokens))


def test_lms_that_keep_no_keys_are_asked_one_at_a_time(tmp_path):
    local = completer(build_odd_lm(tmp_path / "mamba", "mamba"))
    assert local._reader.reader.fault is not None
    done = []
    found = local.complete(PROMPTS[5:], max_new_tokens=3, stop="no such", advance=done.append)
    for prompt, completion in zip(PROMPTS[5:], found, strict=True):
        assert completion.text == local._text(greedy(local, prompt, completion.num_new_tokens))
    assert done == [1, 1]
    scores = local.score(PROMPTS[5:], [" great"])
    ids = local._tokenize(PROMPTS[5:])[0]
    token = local._tokenize([PROMPTS[5] + " great"])[0][len(ids) :]
    assert scores[0][0] == pytest.approx(chance_alone(local.lm, ids, token))


def test_what_does_not_fit_the_window_is_refused(tmp_path):
    local = completer(build_lm(tmp_path / "lm", "gpt2", window=64))
    with pytest.raises(ConfigError, match=r"prompt 2 has \d+ tokens .*holds 64 with the 10 that"):
        local.complete([PROMPTS[5], PROMPTS[0]], max_new_tokens=10, stop="\n")
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        local.complete([""], max_new_tokens=1, stop="\n")
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        local.complete(["a"], max_new_tokens=0, stop="\n")
    assert local.complete([], max_new_tokens=1, stop="\n") == []


def test_a_word_that_the_tokenizer_joins_to_the_prompt_is_refused(lm_dirs):
    local = completer(lm_dirs["gpt2"])
    with pytest.raises(ModelError, match="joins 'nswer is' to the prompt before it"):
        local.score(["The a"], ["nswer is"])
    with pytest.raises(ModelError, match="joins '' to the prompt"):
        local.score(["The"], [""])


def test_a_prompt_without_a_finite_number_is_refused(lm_dirs):
    local = completer(lm_dirs["gpt2"])
    assert local._reader.reader.fault is None
    local.lm.model.wte.weight.data[:] = float("inf")
    with pytest.raises(ModelError, match="gives no finite number in torch.float32"):
        local.complete(PROMPTS[:1], max_new_tokens=1, stop="\n")


@pytest.mark.slow
def test_a_real_lm_writes_what_generate_writes(two_threads):
    local = completer("bundled:smollm2-135m")
    shown = [("what is the capital of france?", "Paris"), ("who wrote hamlet?", "Shakespeare")]
    start = "\n\n".join(f"Q: {question}\nA: {answer}" for question, answer in shown)
    asked = ["what is the capital of italy?", "who wrote faust?", "where is the river main?"]
    prompts = [f"{start}\n\nQ: {question}\nA:" for question in asked]
    prompts += [
        f"Q: {shown[1][0]}\nA: {shown[1][1]}\n\nQ: {question}\nA:" for question in asked[:2]
    ]
    found = local.complete(prompts, max_new_tokens=10, stop="\n")
    ids = local._tokenize(prompts)
    written = write_alone(
        local.lm, ids, max_new_tokens=10, is_done=lambda tokens: local._is_done(tokens, "\n")
    )
    assert [one.text for one in found] == [local._text(w).split("\n")[0] for w in written]
    assert [one.num_new_tokens for one in found] == [len(w) for w in written]
    first = found[0].text.split()[0]  # what it wrote is what it thinks likeliest
    scores = local.score(prompts[:1], [f" {first}", " Berlin", " New York"])[0]
    assert max(scores) == scores[0]
