"""Exact match agrees with SQuAD's official evaluation, on cases worked by hand."""

import pytest

from pgra.report.text_metrics import exact_matches, is_exact_match, normalize_answer


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Beatles", "beatles"),
        ("Padmé Amidala.", "padmé amidala"),
        ("U.S.A.", "usa"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("“quoted”", "“quoted”"),  # ASCII punctuation only, as the official one
        ("A", ""),
        (" New\nYork ", "new york"),
    ],
)
def test_normalising_is_squads(text, plain):
    assert normalize_answer(text) == plain


def test_any_alias_is_right_and_a_part_is_not():
    answers = ["Sunset Blvd", "Sunset Boulevard"]
    assert is_exact_match(" the Sunset Boulevard.", answers)
    assert not is_exact_match("Sunset", answers)
    assert not is_exact_match("Sunset Boulevard, Los Angeles", answers)
    assert exact_matches(["sunset blvd", "no"], [answers, ["yes"]]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="zip"):
        exact_matches(["a"], [["a"], ["b"]])
