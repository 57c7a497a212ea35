"""Optuna's study."""

import pytest

from pgra.config import SeriesArguments
from pgra.errors import ArtifactError
from pgra.experiments.search import Study

SERIES = SeriesArguments(
    search="optuna", search_learning_rates=["1e-5", "1e-2"], search_batch_sizes=["4,8"]
)


def asked(root, *, seed=1, stop=None):
    """Ask a study for six points and tell it of all but the last one before a stop."""
    study, found = Study(root, SERIES, seed), []
    for number in range(6):
        found.append(study.ask(number))
        if number == stop:
            return found
        study.tell(number, found[-1].learning_rate * 10 + found[-1].batch_size / 1000)
    return found


def test_points_lie_between_the_ends_and_a_stopped_study_asks_for_the_same(tmp_path):
    whole = asked(tmp_path / "whole")
    assert all(1e-5 <= point.learning_rate <= 1e-2 for point in whole)
    assert {point.batch_size for point in whole} == {4, 8}
    for stop in (0, 3):
        assert asked(tmp_path / f"{stop}", stop=stop) == whole[: stop + 1]
        assert asked(tmp_path / f"{stop}") == whole
    assert asked(tmp_path / "other", seed=2) != whole  # the control


def test_a_study_of_something_else_is_refused(tmp_path):
    asked(tmp_path)
    with pytest.raises(ArtifactError, match=r"was made with seed 1, this run asks for 2: choose"):
        Study(tmp_path, SERIES, 2)
    other = SeriesArguments(search="optuna", search_learning_rates=["1e-5", "1e-3"])
    with pytest.raises(ArtifactError, match=r"with search_learning_rates \[1e-05,0.01\], this"):
        Study(tmp_path, other, 1)
