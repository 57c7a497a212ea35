"""A study as a figure."""

import pytest
from planted_runs import plant, plant_grid

from pgra.report.compare import compare_runs, load_reference
from pgra.report.results import load_collection
from pgra.report.tables import draw_study

pytestmark = pytest.mark.slow
NOWHERE = pytest.approx(float("nan"), nan_ok=True)


def lines(axes, marker, style):
    """Return the y values of the lines drawn in one way."""
    found = [x for x in axes.lines if (x.get_marker(), x.get_linestyle()) == (marker, style)]
    return [list(line.get_ydata()) for line in found]


def test_a_grid_over_a_number_is_a_line_without_what_is_missing(tmp_path):
    points = {
        "k=16": {"value": 16, "seeds": {0: [1, 2], 1: [1]}},
        "k=50": {"value": 50, "seeds": {0: [1], 1: None}},
        "k=100": {"value": 100, "seeds": {0: None, 1: None}},
    }
    (group,) = load_collection([plant_grid(tmp_path, points)])
    figure = draw_study(compare_runs(group, reference=load_reference("T5")))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "50", "100"]
    assert lines(axes, "o", "-") == [[pytest.approx(100 * 77 / 80), 97.5, NOWHERE]]
    assert lines(axes, "D", "--") == [[93.6, 92.8, NOWHERE]]
    assert lines(axes, "o", "None") == [[95.0, 97.5]]  # the seeds of the first
    assert "hollow: the paper's values" in figure.get_suptitle()


def test_methods_are_dots_with_intervals_in_a_panel_a_task_and_one_for_the_average(tmp_path):
    for task in ("sst2", "cr"):
        for method in ("fid", "pgra"):
            plant(tmp_path / task / method, method=method, task=task, wrong=[1])
    figure = draw_study(compare_runs(load_collection([tmp_path])[0]))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [f"{name}, in hundredths" for name in ("sst2", "cr", "average")]
    first = figure.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == ["pgra", "fid"]
    (dots,) = (line for line in first.lines if line.get_marker() == "o")
    assert list(dots.get_xdata()) == [97.5, 97.5]
