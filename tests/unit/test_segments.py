"""Groups of like length: every token once, and no cheaper cut left."""

from itertools import combinations

import numpy as np
import pytest
import torch

from pgra.lm.batching import GroupCost, group_by_length, pack_segments


def cost_of(groups, lengths, cost):
    return sum(lengths[g].max() * len(g) + cost.overhead for g in groups)


@pytest.mark.parametrize("overhead", [0, 3, 10, 1000])
def test_no_other_cut_of_the_sorted_lengths_is_cheaper(overhead):
    lengths = np.array([5, 2, 9, 9, 3, 5, 14, 2])
    cost = GroupCost(overhead, 1 << 20)
    found = cost_of(group_by_length(lengths, cost), lengths, cost)
    order = np.sort(lengths)
    every = [
        [order[a:b] for a, b in zip((0, *cuts), (*cuts, len(order)), strict=True)]
        for count in range(len(order))
        for cuts in combinations(range(1, len(order)), count)
    ]
    assert found == min(sum(len(g) * g.max() + overhead for g in groups) for groups in every)


def test_groups_hold_each_segment_once_and_fit():
    lengths = np.random.default_rng(0).integers(1, 90, size=300)
    groups = group_by_length(lengths, GroupCost(16, 256))
    assert sorted(np.concatenate(groups).tolist()) == list(range(300))
    assert all(lengths[g].max() * len(g) <= 256 for g in groups)
    (alone,) = group_by_length(np.array([300]), GroupCost(16, 256))
    assert alone.tolist() == [0]


def test_a_free_call_leaves_no_padding_and_a_dear_one_leaves_one_group():
    lengths = np.array([5, 2, 9, 9, 3, 5])
    assert len(group_by_length(lengths, GroupCost(0, 1 << 20))) == 4
    assert len(group_by_length(lengths, GroupCost(10_000, 1 << 20))) == 1


def test_places_tell_where_each_examples_tokens_went():
    examples = [
        [np.array([7, 8, 9], np.int32), np.array([1], np.int32)],
        [np.array([4, 5], np.int32)],
    ]
    packed = pack_segments(examples, pad_token_id=0, cost=GroupCost(10_000, 1 << 20))
    assert packed.groups == ((3, 3, 6),)
    assert packed.input_ids.tolist() == [1, 0, 0, 4, 5, 0, 7, 8, 9]
    assert packed.attention_mask.tolist() == [True, False, False, True, True, False] + [True] * 3
    assert packed.places.tolist() == [[6, 7, 8, 0], [3, 4, -1, -1]]
    assert packed.places.dtype is packed.input_ids.dtype is torch.int64


def test_an_example_without_tokens_is_refused():
    for examples in ([[]], [[np.array([], np.int32)]]):
        with pytest.raises(ValueError, match="no segment, or a segment no token"):
            pack_segments(examples, pad_token_id=0, cost=GroupCost(1, 1))
