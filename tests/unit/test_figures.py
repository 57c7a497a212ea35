"""A study as a figure."""

import pytest
from planted_runs import plant_grid

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
