"""Rows beside a baseline: what is a win, which seeds are paired, and the tables of both."""

import numpy as np
import pytest
from planted_runs import places, plant, plant_grid

from pgra.report.compare import AVERAGE, compare_runs, load_reference
from pgra.report.results import load_collection
from pgra.report.tables import detail_table, long_table, results_table

BOTH = places(500, 0.06, 1)
ONLY_FID = [i for i in range(500) if i not in set(BOTH)]
HALF = places(200, 0.15, 0)


def load(root, reference=None, **more):
    table = load_reference(reference) if reference else None
    return compare_runs(load_collection([root])[0], reference=table, **more)


def study(root, *, task="sst2", n=200, text="text", baseline=None, compares=True, **methods):
    """Plant each method's wrong decisions by seed, and compare all that is there."""
    for method, seeds in methods.items():
        for seed, wrong in seeds.items():
            folder = root / f"{task}-{method}-{seed}"
            plant(folder, method=method, task=task, seed=seed, n=n, wrong=wrong, text=text)
    return load(root, baseline=baseline) if compares else None


def planted_gap(root, task="sst2", seeds=(0, 1), **more):
    """Plant fid and pgra, of which fid is 5 points worse on 500 examples in every seed."""
    fid = {seed: BOTH + ONLY_FID[seed::18][:25] for seed in seeds}
    return study(root, task=task, n=500, fid=fid, pgra=dict.fromkeys(seeds, BOTH), **more)


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
    assert [row[-1].text for row in detail_table(found).rows] == ["baseline", word]


def test_what_no_seed_decides_stands_beside_every_seed(tmp_path):
    """In-context learning has no reader to seed; it stands beside readers of several."""
    plain = {seed: range(seed) for seed in (0, 2)}
    found = study(tmp_path, n=40, icl={42: range(8)}, plain=plain, baseline="plain")
    one = found.comparisons["icl", "sst2"]
    assert one.gap.difference == pytest.approx(-8 / 40 + 1 / 40)
    assert (one.better, one.shared) == (0, 2)
    still = study(tmp_path / "still", n=40, icl={0: [1]}, knn={0: range(30)}, baseline="icl")
    assert still.comparisons["knn", "sst2"].verdict == "worse"  # neither has a seed


def test_holm_is_over_the_tasks_of_a_row(tmp_path):
    for task in ("sst2", "cr"):
        planted_gap(tmp_path, task, seeds=(0,), compares=False)
    found = study(tmp_path, task="mr", fid={0: [1]}, pgra={0: [1]})
    assert found.tasks == ["sst2", "cr", "mr"]
    by_task = {task: found.comparisons["pgra", task] for task in found.tasks}
    smallest, second = sorted(by_task[task].gap.p for task in ("sst2", "cr"))
    adjusted = {by_task[task].p for task in ("sst2", "cr")}
    assert adjusted == {3 * smallest, max(3 * smallest, 2 * second)}


def test_a_planted_gap_of_5_points_is_a_win(tmp_path):
    won = planted_gap(tmp_path, "sst2").comparisons["pgra", "sst2"]
    assert won.gap.interval[0] > 0.02
    assert won.gap.p <= 0.001
    found = planted_gap(tmp_path, "cr")
    assert found.results["pgra", AVERAGE].sd is not None
    assert found.results["pgra", AVERAGE].mean == pytest.approx(0.94)
    one, alone = found.comparisons["pgra", AVERAGE], found.comparisons["pgra", "cr"].gap
    for each in (won, one):
        assert each.gap.difference == pytest.approx(0.05)
        assert (each.better, each.shared, each.verdict) == (2, 2, "better")
    assert np.ptp(one.gap.interval) < 0.8 * np.ptp(alone.interval)


def test_seeds_that_differ_have_an_interval_over_seeds(tmp_path):
    """k-NN decides alike with every seed: an interval of no width would say too much."""
    knn, fid = dict.fromkeys(range(3), range(10)), {0: range(10), 1: range(12)}
    results = study(tmp_path, n=40, knn=knn, fid=fid).results
    low, high = results["fid", "sst2"].interval
    assert high - low == pytest.approx(2 * 12.706 * 0.025, rel=1e-3)  # t of 1, and sd / sqrt(2)
    assert results["knn", "sst2"].interval[0] < 0.7 < 0.8 < results["knn", "sst2"].interval[1]


def test_a_grid_has_its_points_in_order(tmp_path):
    points = {
        "k=50": {"value": 50, "seeds": {0: None, 1: None}},
        "k=16": {"value": 16, "seeds": {0: [1], 1: None}},
        "k=8": {"value": 8, "seeds": {0: [1, 2], 1: [1]}},
    }
    few = {"num_candidates": 8}
    found = load(plant_grid(tmp_path / "g", points, baseline=few, reference="T5"), "T5")
    assert (found.rows, found.baseline) == (["k=50", "k=16", "k=8"], "k=8")
    assert set(found.comparisons) == {("k=16", "sst2")}
    table = results_table(found)
    shown = [[cell.text for cell in row] for row in table.rows]
    assert shown[:2] == [["k=50", "missing", ""], ["k=16", "97.5 (1 of 2 seeds)", "93.6"]]
    numbers = next(row for row in long_table([found]).rows if row[1].text == "k=50")
    assert {cell.value for cell in numbers} == {None}  # never 0


def test_rows_are_methods_columns_are_tasks_with_the_papers_beside(tmp_path):
    """Rows that lack a task have no average; what wins beyond noise stands out."""
    more = [[i for i in range(seed, 200, 9) if i not in HALF][seed:18] for seed in (0, 1)]
    fid, pgra = ({s: HALF + more[s] for s in (0, 1)}, {s: HALF[s:] for s in (0, 1)})
    study(tmp_path, fid=fid, pgra=pgra)
    plant(tmp_path / "t", method="plain", task="trec", n=10, wrong=[0], notes=["bundled: small"])
    found = load(tmp_path, "T2a")
    table = results_table(found)
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["plain", "missing", "91.3", "90.0", "80.4"],
        ["fid", "76.2 ± 0.4", "92.2", "missing", "80.8"],
        ["pgra", "85.2 ± 0.4", "93.9", "missing", "80.8"],
    ]
    bold = [cell.text for row in table.rows for cell in row if cell.is_bold]
    assert bold == ["85.2 ± 0.4"]
