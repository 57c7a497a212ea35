"""States agree to a share of their length; in half precision, of what a text has of its own."""

import pytest
import torch

from pgra.lm.prefix import is_same

# Two texts: (10, 1) and (10, -1). Their mean is (10, 0), so each has 1 of its own, at length 10.05.
TRUTH = torch.tensor([[10.0, 1.0], [10.0, -1.0]])


def moved(by, dtype=torch.float32):
    states = TRUTH.clone()
    states[1, 1] += by
    return states.to(dtype), TRUTH.to(dtype)


@pytest.mark.parametrize(("by", "same"), [(0.0, True), (0.0009, True), (0.0012, False)])
def test_float32_states_agree_to_a_share_of_their_length(by, same):
    assert is_same(*moved(by), tolerance=1e-4) is same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("by", "same"), [(0.0, True), (0.25, True), (0.5, False)])
def test_half_precision_states_agree_to_a_third_of_what_is_their_own(by, same, dtype):
    assert is_same(*moved(by, dtype), tolerance=0.05) is same  # 0.05 of 10.05 is 0.5


def test_an_error_of_the_dtype_itself_is_no_fault_of_a_way():
    assert is_same(*moved(0.5, torch.bfloat16), tolerance=0.05, noise=0.25)
    assert not is_same(*moved(0.5, torch.bfloat16), tolerance=0.05, noise=0.2)
    assert not is_same(*moved(0.75, torch.bfloat16), tolerance=0.05, noise=9.0)  # the length's


def test_one_text_has_nothing_of_its_own_to_compare_with():
    states, truth = moved(0.4, torch.bfloat16)
    assert is_same(states[1:], truth[1:], tolerance=0.05)
    assert not is_same(states, truth, tolerance=0.05)


def test_every_copy_must_agree():
    states, truth = moved(0.0)
    both = states.repeat(2, 1)
    assert is_same(both, truth, tolerance=1e-4, copies=2)
    both[3, 1] += 0.1
    assert not is_same(both, truth, tolerance=1e-4, copies=2)
