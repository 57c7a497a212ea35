"""The speed is measured on what a fill would read, as a fill would read it."""

import time

import pytest
from conftest import SENTENCES

from pgra.lm import cost as calibration
from pgra.lm.causal_lm import CausalLM
from pgra.lm.cost import Speed, measure_speed, own_lengths
from pgra.lm.prefix import PromptedEncoder, Prompts
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

PROMPT = FewShotPrompt(PromptTemplate("Good?\n{text}"), "Follow:\nGood?\nA film.\nThe answer is no")


@pytest.fixture(autouse=True)
def no_budget_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))


def encoder_of(lm_dirs, **options):
    lm = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu")
    return PromptedEncoder(lm, PROMPT, **options)


def test_own_tokens_are_those_behind_the_prefix(lm_dirs):
    encoder = encoder_of(lm_dirs)
    prompts = encoder.tokenize([PROMPT.template.passage_fields(text) for text in SENTENCES]).ids
    shared = len(encoder.shared_ids)
    assert shared > 10
    assert own_lengths(encoder, prompts) == [len(ids) - shared for ids in prompts]
    stranger = [1, 2, 3]
    assert own_lengths(encoder, [stranger, *prompts])[0] == 3
    without = encoder_of(lm_dirs, sharing="none")
    assert own_lengths(without, prompts) == [len(ids) for ids in prompts]


def ordinary(encoder):
    """Give the sentences whose prompts begin with the shared tokens, longest first."""
    fields = [PROMPT.template.passage_fields(text) for text in SENTENCES]
    prompts = encoder.tokenize(fields)
    own = own_lengths(encoder, prompts.ids)
    order = [i for i in range(12) if own[i] < len(prompts.ids[i])]
    order.sort(key=lambda i: -own[i])
    piece = Prompts([fields[i] for i in order], [prompts.ids[i] for i in order])
    return [SENTENCES[i] for i in order], piece, [own[i] for i in order]


def test_a_piece_counts_what_was_timed_all_but_its_last_batch(lm_dirs):
    encoder = encoder_of(lm_dirs, batch_tokens=1)
    texts, piece, own = ordinary(encoder)
    batches = []
    encoder.encode_prompts(piece, advance=batches.append)
    assert len(batches) > 2
    read = calibration._read(encoder, piece)
    assert read.texts == len(texts) - batches[-1]
    assert read.tokens == sum(own[: read.texts])
    roomy = encoder_of(lm_dirs, batch_tokens=4096)  # one batch: it is all there is
    read = calibration._read(roomy, piece)
    assert (read.texts, read.tokens) == (len(texts), sum(own))


def test_a_single_piece_is_read_again_when_it_is_warm(lm_dirs):
    encoder = encoder_of(lm_dirs)
    texts, _, own = ordinary(encoder)
    speed = measure_speed(encoder, iter([texts]), seconds=60)
    assert (speed.texts, speed.tokens) == (len(texts), sum(own))
    assert speed.seconds > 0
    assert speed.load_seconds > 0


def test_pieces_hold_each_text_of_a_shard_once(lm_dirs):
    encoder = encoder_of(lm_dirs)
    for most, least in ((10**6, 1), (60, 3)):
        pieces = list(calibration._pieces(encoder, iter([SENTENCES]), most))
        assert len(pieces) >= least
        told = [fields["text"] for piece in pieces for fields in piece.fields]
        assert sorted(told) == sorted(SENTENCES)


def test_the_longest_come_first_and_those_read_whole_last():
    prompts = [[0] * 53, [0] * 59, [0] * 70, [0] * 59]
    assert calibration._order([3, 9, 70, 9], prompts) == [1, 3, 0, 2]


def test_it_stops_when_the_time_is_up_but_reads_one_piece(lm_dirs):
    def endless():
        while True:
            yield SENTENCES

    encoder = encoder_of(lm_dirs)
    encoder.encode(SENTENCES)
    start = time.perf_counter()
    speed = measure_speed(encoder, endless(), seconds=0.2)
    assert 0.2 <= time.perf_counter() - start < 2
    assert speed.texts > len(SENTENCES)
    one = measure_speed(encoder, iter([SENTENCES[:3]]), seconds=1e-9)
    assert one.texts == 1


def test_pieces_shrink_where_one_would_take_far_too_long(lm_dirs):
    encoder = encoder_of(lm_dirs)
    fields = [PROMPT.template.passage_fields(text) for text in SENTENCES]
    whole = sum(own_lengths(encoder, encoder.tokenize(fields).ids))
    assert calibration._piece_tokens(encoder, SENTENCES, 60.0) == whole
    assert calibration._piece_tokens(encoder_of(lm_dirs, batch_tokens=5), SENTENCES, 60.0) == 30
    assert calibration._piece_tokens(encoder, SENTENCES, 1e-9) == 1


def test_a_sorted_shard_is_cut_into_runs_of_equal_tokens():
    lengths = [3, 9, 1, 5, 2, 4]
    order = [1, 3, 5, 0, 4, 2]
    assert calibration._cut(order, lengths, 24) == [[1, 3, 5, 0, 4, 2]]
    assert calibration._cut(order, lengths, 12) == [[1, 3], [5, 0, 4, 2]]
    assert calibration._cut([0], [50], 12) == [[0]]


def test_speed_by_hand():
    assert Speed(texts=5, tokens=200, seconds=4.0, load_seconds=9.0).tokens_per_second == 50
