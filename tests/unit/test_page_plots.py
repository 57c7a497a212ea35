import re

from pgra.report.page import PlotRow, interval_plot, sweep_plot


def circles(svg, kind):
    return [float(x) for x in re.findall(rf'class="{kind}" cx="([\d.]+)"', svg)]


def test_a_plot_puts_values_in_place():
    # Ticks 50, 55, ..., 70 from x = 24 to 376: 17.6 a point.
    svg = interval_plot("accuracy", [PlotRow("pgra", [0.6, 0.65], (0.5, 0.7))])
    assert circles(svg, "mean") == [244.0]
    assert circles(svg, "seed") == [200.0, 288.0]
    assert 'class="range" x1="24.0" x2="376.0"' in svg
    assert "62.5 (50.0 to 70.0)" in svg
    assert re.findall(r">(\d+)</text>", svg) == ["50", "55", "60", "65", "70"]


def test_a_plot_says_what_is_missing_and_draws_no_zero():
    svg = interval_plot("accuracy", [PlotRow("k=8", [0.6], (0.5, 0.7)), PlotRow("k=16", [])])
    assert len(circles(svg, "mean")) == 1
    assert ">missing</text>" in svg


def test_an_interval_wider_than_all_values_is_drawn_up_to_one():
    svg = interval_plot("accuracy", [PlotRow("pgra", [0.9, 0.95], (0.607, 1.243))])
    (left, right) = re.search(r'x1="([\d.]+)" x2="([\d.]+)" y1="30"', svg).groups()
    assert float(right) == 376.0
    assert "92.5 (60.7 to 124.3)" in svg
    assert float(left) > 24.0


def test_a_plot_of_equal_values_has_an_axis_and_escaped_names():
    svg = interval_plot("<i>", [PlotRow("<b>", [1.0], (1.0, 1.0))])
    assert circles(svg, "mean") == [24.0]
    assert "<b>" not in svg
    assert "<i>" not in svg


def test_a_sweep_joins_neighbours_and_leaves_a_gap_where_one_is_missing():
    # Ticks 50, 55, ..., 70 from y = 228 up to 12; four points from x = 60 to 364.
    points = [("1", [0.5]), ("4", [0.6]), ("16", []), ("64", [0.7])]
    svg = sweep_plot("accuracy", "k", [PlotRow(name, values) for name, values in points])
    assert re.findall(r'class="mean" cx="([\d.]+)" cy="([\d.]+)"', svg) == [
        *(("60.0", "228.0"), ("161.3", "120.0"), ("364.0", "12.0"))
    ]
    assert svg.count('class="trend"') == 1
    assert 'x1="60.0" y1="228.0" x2="161.3" y2="120.0"' in svg
    assert svg.count(">missing<") == 1


def test_the_papers_value_is_a_diamond_beside_ours_where_it_prints_one():
    rows = [PlotRow("pgra", [0.6], (0.5, 0.7), paper=0.65), PlotRow("fid", [0.6])]
    for svg in (interval_plot("accuracy", rows), sweep_plot("accuracy", "k", rows)):
        assert svg.count('class="paper"') == 1
        assert "The paper (diamonds): pgra: 65.0" in svg
    assert '<path class="paper" d="M288.0 24' in interval_plot("accuracy", rows)
    assert "paper" not in interval_plot("accuracy", rows[1:])
