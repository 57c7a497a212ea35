"""A study as a figure."""

import pytest
from planted_runs import plant, plant_grid

from pgra.report.compare import compare_runs, load_reference
from pgra.report.figures import draw_study, number_axis
from pgra.report.results import load_collection

pytestmark = pytest.mark.slow

POINTS = {
    "k=16": {"value": 16, "seeds": {0: [1, 2], 1: [1]}},
    "k=50": {"value": 50, "seeds": {0: [1], 1: None}},
    "k=100": {"value": 100, "seeds": {0: None, 1: None}},
}
NOWHERE = pytest.approx(float("nan"), nan_ok=True)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root = plant_grid(tmp_path_factory.mktemp("k"), POINTS, reference="T5")
    return compare_runs(load_collection([root]).groups[0], reference=load_reference("T5"))


@pytest.fixture(scope="module")
def methods(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for task in ("sst2", "cr"):
        for method in ("fid", "pgra"):
            plant(root / task / method, method=method, task=task, wrong=[1])
    return compare_runs(load_collection([root]).groups[0])


def lines(axes, marker, style):
    """Return the y values of the lines drawn in one way."""
    found = [x for x in axes.lines if (x.get_marker(), x.get_linestyle()) == (marker, style)]
    return [list(line.get_ydata()) for line in found]


def test_a_grid_over_a_number_is_a_line_without_what_is_missing(sweep):
    assert number_axis(sweep) == "retriever.num_candidates"
    figure = draw_study(sweep)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "50", "100"]
    assert lines(axes, "o", "-") == [[pytest.approx(100 * 77 / 80), 97.5, NOWHERE]]
    assert lines(axes, "D", "--") == [[93.6, 92.8, NOWHERE]]
    assert lines(axes, "o", "None") == [[95.0, 97.5]]  # the seeds of the first
    assert axes.get_xlabel() == "k"
    title = figure.get_suptitle()
    assert "missing: k=100 (sst2)" in title
    assert "hollow: the paper's values" in title


def test_methods_are_dots_with_intervals_in_a_panel_a_task_and_one_for_the_average(methods):
    assert number_axis(methods) is None
    figure = draw_study(methods)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [
        *("sst2, accuracy in hundredths", "cr, accuracy in hundredths", "average, in hundredths")
    ]
    assert [label.get_text() for label in shown[0].get_yticklabels()] == ["pgra", "fid"]
    (dots,) = (line for line in shown[0].lines if line.get_marker() == "o")
    assert list(dots.get_xdata()) == [97.5, 97.5]
    assert "hollow" not in figure.get_suptitle()
