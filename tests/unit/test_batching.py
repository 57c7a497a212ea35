"""Batches keep their budget, hold each item once, and grow smaller where memory runs out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.errors import ModelError
from pgra.lm.batching import BackOff, group_by_prefix, pad, token_budget_batches

START = list(range(100, 150))
few = settings(max_examples=30, derandomize=True, deadline=None)


def test_a_batch_has_no_more_rows_than_it_may():
    assert token_budget_batches([1, 1, 1], 10, max_rows=2) == [[0, 1], [2]]


@few
@given(st.lists(st.integers(0, 64), max_size=60), st.integers(1, 200))
def test_each_index_comes_once_and_each_batch_keeps_the_budget(lengths, budget):
    batches = token_budget_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= budget for b in batches)
    assert [lengths[i] for b in batches for i in b] == sorted(lengths, reverse=True)


class Device:
    """Holds so many tokens at a time."""

    def __init__(self, room):
        self.room, self.failed = room, []

    def run(self, batch):
        if sum(batch) > self.room:
            self.failed.append(sum(batch))
            raise torch.OutOfMemoryError
        return list(batch)


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(9, 60))
def test_a_batch_that_does_not_fit_is_run_in_parts_and_later_ones_fit(sizes, room):
    device, back_off = Device(room), BackOff(1000, "")
    parts = back_off.run(sizes, sum, device.run)
    assert [size for part in parts for size in part] == sizes
    num_failed = len(device.failed)
    assert (num_failed > 0) == (sum(sizes) > room)
    parts = back_off.run(sizes, sum, device.run)
    assert [size for part in parts for size in part] == sizes
    assert len(device.failed) == num_failed


def test_one_text_that_does_not_fit_is_refused():
    with pytest.raises(ModelError, match="7 tokens"):
        BackOff(40, "here: buy more").run([7], sum, Device(6).run)


def test_texts_are_padded_on_the_right_by_hand():
    ids, mask = pad([[5, 6], [], [7]], 9)
    assert (ids.tolist(), mask.sum(1).tolist()) == ([[5, 6], [9, 9], [7, 9]], [2, 0, 1])


OTHER = list(range(300, 360))
ALIKE = [[*START, 7, i] for i in range(6)]
GROUPED = {
    "one beginning": ([[*START, 7, 1], [*START, 3], [*START, 7, 2, 2]], [(50, [0, 1, 2])]),
    "an odd one alone": ([OTHER, *ALIKE], [(51, [1, 2, 3, 4, 5, 6]), (0, [0])]),
    "two draws": (
        [[*START, 1], [*OTHER, 1], [*START, 2], [*OTHER, 2]],
        [(50, [0, 2]), (60, [1, 3])],
    ),
}


@pytest.mark.parametrize("name", GROUPED)
def test_prompts_that_begin_alike_are_grouped(name):
    prompts, groups = GROUPED[name]
    found = group_by_prefix(prompts)
    assert [(len(shared), rows) for shared, rows in found] == groups
