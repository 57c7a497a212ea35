"""Prompts that begin alike are grouped, and one odd prompt takes nothing from the others."""

from pgra.lm.generate import PrefixGroup, group_by_prefix

START = list(range(100, 150))


def test_prompts_of_one_beginning_are_one_group():
    prompts = [[*START, 7, 1], [*START, 3], [*START, 7, 2, 2]]
    assert group_by_prefix(prompts) == [PrefixGroup(50, [1, 0, 2])]


def test_each_prompt_keeps_a_token_of_its_own():
    prompts = [[*START, 7], [*START, 7], START]
    assert group_by_prefix(prompts) == [PrefixGroup(49, [2, 0, 1])]


def test_an_odd_prompt_stands_alone():
    odd = [*START[:34], 9, 9, 9]
    group = [[*START, 7, i] for i in range(6)]
    assert group_by_prefix([odd, *group]) == [
        PrefixGroup(51, [1, 2, 3, 4, 5, 6]),
        PrefixGroup(0, [0]),
    ]
    pair = group_by_prefix([odd, group[0]])  # with fewer to lose, sharing less saves more
    assert pair == [PrefixGroup(34, [0, 1])]


def test_two_draws_of_exemplars_are_two_groups():
    other = list(range(300, 360))
    prompts = [[*START, 1], [*other, 1], [*START, 2], [*other, 2]]
    assert group_by_prefix(prompts) == [PrefixGroup(50, [0, 2]), PrefixGroup(60, [1, 3])]


def test_short_beginnings_are_not_shared():
    few, little = [[*START[:31], i] for i in (1, 2)], [[*START, *[i] * 160] for i in (1, 2)]
    assert group_by_prefix(few) == [PrefixGroup(0, [0, 1])]
    assert group_by_prefix(few, least=31) == [PrefixGroup(31, [0, 1])]
    assert group_by_prefix(little) == [PrefixGroup(0, [0, 1])]  # less than a quarter
    assert group_by_prefix([]) == []
