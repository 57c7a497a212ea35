import pytest

from pgra.config import DataArguments, SeriesArguments, parse_arguments
from pgra.errors import ConfigError


def read(*words):
    (series,) = parse_arguments([SeriesArguments], words, prog="train.py", description="")
    return series


@pytest.mark.parametrize("words", [["0", "1", "2"], ["0,1,2"], ["0,1", "2"]])
def test_seeds_are_read_with_spaces_or_commas(words):
    assert read("--seeds", *words).seed_list() == [0, 1, 2]
    assert not read("--seeds", *words).is_single


def test_without_words_there_is_one_training_and_the_papers_grid():
    series = read()
    assert series.is_single
    assert series.seed_list() == []
    assert series.learning_rates() == [1e-5, 2e-5, 5e-5, 8e-5, 1e-4]
    assert series.batch_sizes() == [4, 8]
    assert not read("--search", "grid").is_single


def test_a_yaml_gives_lists_and_other_programs_pass_them_over(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seeds: [3, 4]\nsearch: grid\nsearch_learning_rates: [1.0e-3, 2.0e-3]\n")
    series = read("--config", str(path))
    assert series.seed_list() == [3, 4]
    assert series.learning_rates() == [0.001, 0.002]
    (data,) = parse_arguments(
        [DataArguments], ["--config", str(path)], prog="rerank", description=""
    )
    assert data == DataArguments()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seeds", "0", "x"], "seeds holds 'x': give numbers, such as seeds 1 2 or seeds 1,2"),
        (["--seeds", "1.5"], "seeds holds '1.5'"),
        (["--seeds", "1", "1"], "seeds holds 1 twice"),
        (["--seeds", "-1"], "seeds holds -1: each must lie between 0 and"),
        (["--search", "gird"], "unknown search 'gird'. Did you mean 'grid'?"),
        (["--search", "grid", "--search_batch_sizes", "0"], "search_batch_sizes is 0"),
        (["--search", "grid", "--search_learning_rates", "0"], "each must be above 0"),
        (["--search_batch_sizes", "4"], "search_batch_sizes needs a search: add --search grid"),
        (["--num_trials", "4"], "num_trials needs --search optuna"),
        (["--search", "optuna", "--num_trials", "0"], "num_trials is 0"),
    ],
)
def test_what_cannot_be_run_is_refused(words, told):
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert told in str(caught.value)
