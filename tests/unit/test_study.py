from pathlib import Path

import pytest

from pgra.config import SeriesArguments
from pgra.errors import ArtifactError
from pgra.experiments.search import Point, Study, Tried, choose_winner
from pgra.runs import seed_folder, series_folder

SERIES = SeriesArguments(
    search="optuna", search_learning_rates=["1e-5", "1e-2"], search_batch_sizes=["4,8"]
)


def value(point):
    """A made-up dev metric: the larger the learning rate, the better."""
    return point.learning_rate * 10 + point.batch_size / 1000


def asked(root, *, seed, trials, stop=None):
    """Ask a study for points and tell it of all but the last one before a stop."""
    study, found = Study(root, SERIES, seed), []
    for number in range(trials):
        found.append(study.ask(number))
        if number == stop:
            return found
        study.tell(number, value(found[-1]))
    return found


def test_points_lie_between_the_ends_and_depend_on_the_seed(tmp_path):
    found = asked(tmp_path / "a", seed=1, trials=6)
    assert all(1e-5 <= point.learning_rate <= 1e-2 for point in found)
    assert {point.batch_size for point in found} == {4, 8}
    assert asked(tmp_path / "b", seed=1, trials=6) == found
    assert asked(tmp_path / "c", seed=2, trials=6) != found


@pytest.mark.parametrize("stop", [0, 3])
def test_a_stopped_study_asks_for_what_an_unbroken_one_asked_for(tmp_path, stop):
    whole = asked(tmp_path / "whole", seed=1, trials=6)
    broken = asked(tmp_path / "broken", seed=1, trials=6, stop=stop)
    assert asked(tmp_path / "broken", seed=1, trials=6) == whole
    assert broken == whole[: stop + 1]


def test_a_study_of_something_else_is_refused(tmp_path):
    asked(tmp_path, seed=1, trials=1)
    with pytest.raises(ArtifactError, match=r"is a study with seed 1, this search asks for 2: cho"):
        Study(tmp_path, SERIES, 2)
    other = SeriesArguments(search="optuna", search_learning_rates=["1e-5", "1e-3"])
    with pytest.raises(ArtifactError, match=r"with search_learning_rates \[1e-05,0.01\], this"):
        Study(tmp_path, other, 1)


def test_the_first_of_equals_wins():
    tried = [
        Tried(Point(rate, 4), Path(str(rate)), dev, 10)
        for rate, dev in ((1e-5, 0.5), (2e-5, 0.9), (5e-5, 0.9), (8e-5, 0.7))
    ]
    assert choose_winner(tried).point.learning_rate == 2e-5


def test_folders_of_seeds_do_not_meet():
    assert seed_folder("runs/a-{seed}", 3) == Path("runs/a-3")
    assert seed_folder("runs/a", 3) == Path("runs/a/seed-3")
    assert series_folder("runs/a-{seed}", [1, 2]) == Path("runs/a-1+2")
    assert series_folder("runs/a-{seed}", [3]) == Path("runs/a-3")
