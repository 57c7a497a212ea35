"""Rows beside a baseline: what is a win, which seeds are paired, and the tables of both."""

import pytest
from planted_runs import places, plant, plant_grid

from pgra.errors import ConfigError
from pgra.report.compare import (
    AVERAGE,
    compare_runs,
    detail_table,
    load_reference,
    long_table,
    results_table,
)
from pgra.report.results import load_collection

BOTH = places(500, 0.06, 1)
ONLY_FID = [i for i in range(500) if i not in set(BOTH)]
HALF = places(200, 0.15, 0)


def load(root, reference=None, **more):
    table = load_reference(reference) if reference else None
    return compare_runs(load_collection([root]).groups[0], reference=table, **more)


def study(root, *, task="sst2", n=200, text="text", baseline=None, **methods):
    """Plant each method's wrong decisions by seed, and compare all that is there."""
    for method, seeds in methods.items():
        for seed, wrong in seeds.items():
            folder = root / f"{task}-{method}-{seed}"
            plant(folder, method=method, task=task, seed=seed, n=n, wrong=wrong, text=text)
    return load(root, baseline=baseline)


def planted_gap(root, task="sst2", seeds=(0, 1)):
    """Plant fid and pgra, of which fid is 5 points worse on 500 examples in every seed."""
    fid = {seed: BOTH + ONLY_FID[seed::18][:25] for seed in seeds}
    return study(root, task=task, n=500, fid=fid, pgra=dict.fromkeys(seeds, BOTH))


@pytest.mark.parametrize(
    ("fid", "pgra", "seeds", "word"),
    [
        ({0: [1, 2, 3]}, {0: [1, 2]}, (1, 1), "within noise"),
        # Seed 1 is slightly worse; the mean over both is far better, and so says the bootstrap.
        ({0: range(60), 1: range(10)}, {0: [], 1: range(100, 112)}, (1, 2), "seeds disagree"),
        # Better in each seed, and by the bootstrap; fid's seeds differ by more than that.
        (
            *({0: range(5), 1: range(90), 2: range(8)}, dict.fromkeys(range(3), range(3))),
            *((3, 3), "seeds disagree"),
        ),
        ({0: range(60)}, {0: range(90)}, (0, 1), "only one seed"),
        ({0: [1], 1: [1, 2]}, {1: [1], 2: range(20)}, (1, 1), "within noise"),  # 1 is shared
        (*(dict.fromkeys((0, 1), range(n)) for n in (60, 20)), (2, 2), "better"),
        (*(dict.fromkeys((0, 1), range(n)) for n in (20, 60)), (0, 2), "worse"),
    ],
)
def test_what_noise_explains_is_no_win_and_the_verdict_is_a_word(tmp_path, fid, pgra, seeds, word):
    found = study(tmp_path, fid=fid, pgra=pgra)
    one = found.comparisons["pgra", "sst2"]
    assert (one.better, one.shared) == seeds
    assert one.is_win == (word == "better")
    assert [row[-1].text for row in detail_table(found).rows] == ["baseline", word]


def test_equal_means_are_told_from_seeds_that_change_nothing(tmp_path):
    """Both have p = 1 by Welch; only where seeds differ does it say anything, and is shown."""
    shown = {}
    for kind, ours, theirs in (("equal", (10, 20), (20, 10)), ("still", (10, 10), (10, 10))):
        sides = [{seed: range(count) for seed, count in enumerate(s)} for s in (theirs, ours)]
        found = study(tmp_path / kind, fid=sides[0], pgra=sides[1])
        table, one = detail_table(found), found.comparisons["pgra", "sst2"]
        cell = table.rows[-1][table.columns.index("seeds p")]
        shown[kind] = (one.welch, one.has_noise, cell.text)
    assert shown == {"equal": (1.0, True, "1.000"), "still": (1.0, False, "")}


def test_without_a_shared_seed_the_means_are_compared(tmp_path):
    """In-context learning has no reader to seed; it stands beside readers of three."""
    plain = {seed: range(seed) for seed in (0, 2)}
    found = study(tmp_path, n=40, icl={42: range(8)}, plain=plain, baseline="plain")
    one = found.comparisons["icl", "sst2"]
    assert one.gap.difference == pytest.approx(-8 / 40 + 1 / 40)
    assert (one.better, one.shared) == (0, 2)  # no seed decides it: it stands beside each
    won = study(tmp_path, n=40, fid=dict.fromkeys((0, 1), range(39))).comparisons
    assert won["icl", "sst2"].is_win
    # 8 against 0 and 6 against 0 decisions: 2 / 2**8 and 2 / 2**6; the smaller of two, times 2.
    assert one.mcnemar == pytest.approx(2 * 2 / 2**8)


def test_holm_is_over_the_tasks_of_a_row(tmp_path):
    planted_gap(tmp_path, "sst2", seeds=(0,))
    planted_gap(tmp_path, "cr", seeds=(0,))
    found = study(tmp_path, task="mr", fid={0: [1]}, pgra={0: [1]})
    assert found.tasks == ["sst2", "cr", "mr"]
    by_task = {task: found.comparisons["pgra", task] for task in found.tasks}
    smallest, second = sorted(by_task[task].gap.p for task in ("sst2", "cr"))
    adjusted = {by_task[task].holm for task in ("sst2", "cr")}
    assert adjusted == {3 * smallest, max(3 * smallest, 2 * second)}
    # Equal decisions differ by nothing.
    assert (by_task["mr"].gap.p, by_task["mr"].mcnemar, by_task["mr"].holm) == (1.0, 1.0, 1.0)


def test_a_planted_gap_of_5_points_is_a_win_and_the_average_is_tested_over_all_tasks(tmp_path):
    found = planted_gap(tmp_path, "sst2")
    assert (found.baseline, found.rows) == ("fid", ["fid", "pgra"])
    won = found.comparisons["pgra", "sst2"]
    assert won.gap.low > 0.02
    assert won.gap.p <= 0.001
    assert won.mcnemar == pytest.approx(2 * 2 / 2**25)  # 25 to 0, the smaller of two, twice
    found = planted_gap(tmp_path, "cr")
    assert found.results["pgra", AVERAGE].spread.n == 2
    assert found.results["pgra", AVERAGE].spread.mean == pytest.approx(0.94)
    one, alone = found.comparisons["pgra", AVERAGE], found.comparisons["pgra", "cr"].gap
    for each in (won, one):
        assert each.gap.difference == pytest.approx(0.05)
        assert (each.better, each.shared, each.is_win) == (2, 2, True)
    assert one.gap.high - one.gap.low < 0.8 * (alone.high - alone.low)
    # Of one seed: two independent tasks of one spread have theirs over the square root of two.
    for task in ("sst2", "cr"):
        found = study(tmp_path / "one", task=task, n=400, text=task, pgra={0: range(80)})
    average, alone = found.results["pgra", AVERAGE], found.results["pgra", "cr"]
    assert not average.is_over_seeds
    widths = [high - low for low, high in (average.interval, alone.interval)]
    assert widths[0] == pytest.approx(widths[1] / 2**0.5, rel=0.1)


def test_seeds_that_differ_have_an_interval_over_seeds_equal_ones_over_examples(tmp_path):
    """k-NN decides alike with every seed: an interval of no width would say too much."""
    knn, fid = dict.fromkeys(range(3), range(10)), {0: range(10), 1: range(12)}
    results = study(tmp_path, n=40, knn=knn, fid=fid).results
    low, high = results["fid", "sst2"].interval
    assert results["fid", "sst2"].is_over_seeds
    assert high - low == pytest.approx(2 * 12.706 * 0.025, rel=1e-3)  # t of 1, and sd / sqrt(2)
    assert not results["knn", "sst2"].is_over_seeds
    assert results["knn", "sst2"].interval[0] < 0.7 < 0.8 < results["knn", "sst2"].interval[1]


def test_the_baseline_is_the_named_one_else_fid_else_plain_else_none(tmp_path):
    pgra, wrong = {0: [1]}, {0: [2]}
    alone = study(tmp_path, pgra=pgra, icl=wrong)
    assert (alone.baseline, alone.comparisons) == (None, {})
    assert "difference" not in detail_table(alone).columns
    assert study(tmp_path, plain=wrong).baseline == "plain"
    assert study(tmp_path, fid=wrong).baseline == "fid"
    assert load(tmp_path, baseline="pgra").baseline == "pgra"
    with pytest.raises(ConfigError, match="unknown baseline 'rag'"):
        load(tmp_path, baseline="rag")


def test_a_grid_has_its_points_in_order_its_baseline_and_what_is_missing(tmp_path):
    points = {
        "k=50": {"value": 50, "seeds": {0: None, 1: None}},
        "k=16": {"value": 16, "seeds": {0: [1], 1: None}},
        "k=8": {"value": 8, "seeds": {0: [1, 2], 1: [1]}},
    }
    few = {"retriever.num_candidates": 8}
    root = plant_grid(tmp_path / "g", points, baseline=few, reference="T5")
    found = load(root, "T5")
    assert (found.rows, found.baseline) == (["k=50", "k=16", "k=8"], "k=8")
    assert list(found.results["k=16", "sst2"].missing) == [1]
    assert set(found.comparisons) == {("k=16", "sst2")}
    table = results_table(found)
    shown = [[cell.text for cell in row] for row in table.rows]
    assert shown[:2] == [["k=50", "missing", ""], ["k=16", "97.5 (1 of 2 seeds)", "93.6"]]
    assert "Missing: 3 run(s) of the grid." in table.notes
    numbers = next(row for row in long_table(found).rows if row[1].text == "k=50")
    assert {cell.value for cell in numbers} == {None}  # never 0


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    more = [[i for i in range(seed, 200, 9) if i not in HALF][seed:18] for seed in (0, 1)]
    fid, pgra = ({s: HALF + more[s] for s in (0, 1)}, {s: HALF[s:] for s in (0, 1)})
    study(root, fid=fid, pgra=pgra)
    plant(root / "t", method="plain", task="trec", n=10, wrong=[0], notes=["bundled: small"])
    return root


def test_rows_are_methods_columns_are_tasks_with_the_papers_beside(planted):
    """A row that lacks a task has no average; what wins beyond noise stands out."""
    found = load(planted, "T2a")
    table, details, long = results_table(found), detail_table(found), long_table(found)
    assert table.columns == [
        *("method", "sst2", "sst2 (paper)", "trec", "trec (paper)", "average", "average (paper)")
    ]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["plain", "missing", "91.3", "90.0", "80.4", "missing", "85.8"],
        ["fid", "76.2 ± 0.4", "92.2", "missing", "80.8", "missing", "86.5"],
        ["pgra", "85.2 ± 0.4", "93.9", "missing", "80.8", "missing", "87.3"],
    ]
    bold = [cell.text for row in table.rows for cell in row if cell.is_bold]
    assert bold == ["85.2 ± 0.4"]
    for words in ("81.2 is the ceiling", "Table 2, T5-base", "bundled: small"):
        assert words in "\n".join(table.notes)

    row = dict(zip(long.columns, long.rows[6], strict=True))
    assert (len(long.rows), row["value"].value) == (3 * 3, pytest.approx(85.25))  # unrounded
    assert row["p_holm"].value == found.comparisons["pgra", "sst2"].holm
    assert (row["seeds"].text, row["n"].text, row["paper"].value) == ("0 1", "200", 93.9)
    row = dict(zip(details.columns, (cell.text for cell in details.rows[6]), strict=True))
    assert (row["over"], row["difference"], row["seeds better"]) == ("seeds", "+9.0", "2 of 2")
    assert row["paper's difference"] == "+1.7"
