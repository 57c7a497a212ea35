"""Optuna's study."""

from pgra.experiments import SeriesArguments
from pgra.experiments.search import Study

SERIES = SeriesArguments(
    search="optuna", search_learning_rates=["1e-5", "1e-2"], search_batch_sizes=["4,8"]
)


def asked(*, seed=1, favours=1.0):
    """Ask a study for twelve points, and tell it what each gave."""
    study, found = Study(SERIES, seed), []
    for _ in range(12):
        found.append(study.ask())
        study.tell(favours * (found[-1].learning_rate * 10 + found[-1].batch_size / 1000))
    return found


def test_points_lie_between_the_ends_and_follow_from_the_seed_and_what_was_told():
    points = asked()
    assert all(1e-5 <= point.learning_rate <= 1e-2 for point in points)
    assert {point.batch_size for point in points} == {4, 8}
    assert asked() == points  # so a stopped search, told the same again, goes on as it would have
    assert asked(seed=2) != points
    assert asked(favours=-1.0) != points
