import pytest
from planted_runs import places, plant, plant_grid

from pgra.errors import ConfigError
from pgra.report.compare import AVERAGE, compare_runs, detail_table
from pgra.report.results import Group, load_collection, load_run

BOTH = places(500, 0.06, 1)
ONLY_FID = [i for i in range(500) if i not in set(BOTH)]


def group_of(*folders, **more):
    return Group("Results", [load_run(folder) for folder in folders], **more)


def planted_gap(root, task="sst2", seeds=(0, 1)):
    """Plant fid and pgra, of which fid is 5 points worse on 500 examples in every seed."""
    for seed in seeds:
        for method, more in (("fid", ONLY_FID[seed::18][:25]), ("pgra", [])):
            folder, wrong = root / f"{task}/{method}-{seed}", BOTH + more
            plant(folder, method=method, task=task, seed=seed, n=500, wrong=wrong)
    return root


def test_a_planted_gap_of_5_points_is_a_win_and_is_tested_on_examples(tmp_path):
    study = compare_runs(load_collection([planted_gap(tmp_path)]).groups[0])
    assert study.baseline == "fid"
    assert study.rows == ["fid", "pgra"]
    found = study.comparisons["pgra", "sst2"]
    assert found.gap.difference == pytest.approx(0.05)
    assert found.gap.low > 0.02
    assert found.gap.p <= 0.001
    assert found.mcnemar == pytest.approx(2 * 2 / 2**25)  # 25 to 0, the smaller of two, twice
    assert (found.better, found.shared) == (2, 2)
    assert found.is_win


def test_a_loss_and_a_gap_within_noise_are_no_wins(tmp_path):
    folders = [
        plant(tmp_path / "a", method="fid", n=200, wrong=[1, 2, 3]),
        plant(tmp_path / "b", method="pgra", n=200, wrong=[1, 2]),
        plant(tmp_path / "c", method="plain", n=200, wrong=range(60)),
    ]
    study = compare_runs(group_of(*folders))
    assert not study.comparisons["pgra", "sst2"].is_win
    loss = study.comparisons["plain", "sst2"]
    assert loss.gap.difference < 0
    assert loss.holm < 0.01
    assert not loss.is_win


def test_a_gap_that_one_seed_does_not_have_is_no_win(tmp_path):
    """Seed 1 is slightly worse; the mean over both is far better, and so says the bootstrap."""
    for seed, wrong in ((0, range(60)), (1, range(10))):
        plant(tmp_path / f"f{seed}", method="fid", seed=seed, n=200, wrong=wrong)
        plant(tmp_path / f"p{seed}", seed=seed, n=200, wrong=range(100, 112) if seed else ())
    found = compare_runs(load_collection([tmp_path]).groups[0]).comparisons["pgra", "sst2"]
    assert found.holm <= 0.05
    assert (found.better, found.shared) == (1, 2)
    assert not found.is_win


def test_a_gap_within_the_noise_of_training_is_no_win(tmp_path):
    """Better in each seed, and by the bootstrap; but the other's seeds differ by more than that."""
    for seed, wrong in ((0, 5), (1, 90), (2, 8)):
        plant(tmp_path / f"f{seed}", method="fid", seed=seed, n=200, wrong=range(wrong))
        plant(tmp_path / f"p{seed}", seed=seed, n=200, wrong=range(3))
    found = compare_runs(load_collection([tmp_path]).groups[0]).comparisons["pgra", "sst2"]
    assert found.holm <= 0.05
    assert (found.better, found.shared) == (3, 3)
    assert found.welch > 0.05
    assert not found.is_win


def test_equal_means_are_told_from_seeds_that_change_nothing(tmp_path):
    """Both have p = 1 by Welch; only where seeds differ does it say anything, and is shown."""
    shown = {}
    for kind, ours, theirs in (("equal", (10, 20), (20, 10)), ("still", (10, 10), (10, 10))):
        for seed in (0, 1):
            plant(tmp_path / kind / f"f{seed}", method="fid", seed=seed, wrong=range(theirs[seed]))
            plant(tmp_path / kind / f"p{seed}", seed=seed, wrong=range(ours[seed]))
        study = compare_runs(load_collection([tmp_path / kind]).groups[0])
        found = study.comparisons["pgra", "sst2"]
        table = detail_table(study)
        place = table.columns.index("seeds p")
        shown[kind] = (found.welch, found.has_noise, table.rows[-1][place].text)
    assert shown == {"equal": (1.0, True, "1.000"), "still": (1.0, False, "")}


def test_one_seed_is_no_win_but_what_has_no_seeds_may_be(tmp_path):
    icl = plant(tmp_path / "i", method="icl", n=200, wrong=range(3))
    fids = [plant(tmp_path / f"f{s}", method="fid", seed=s, n=200, wrong=range(60)) for s in (0, 1)]
    pgra = plant(tmp_path / "p", n=200, wrong=range(3))
    found = compare_runs(group_of(icl, pgra, *fids)).comparisons
    assert {name: one.is_win for (name, _), one in found.items()} == {"icl": True, "pgra": False}
    assert found["pgra", "sst2"].welch is None


def test_seeds_are_paired_and_what_only_one_has_is_not_compared(tmp_path):
    plant(tmp_path / "f0", method="fid", seed=0, wrong=[1])
    plant(tmp_path / "f1", method="fid", seed=1, wrong=[1, 2])
    plant(tmp_path / "p1", seed=1, wrong=[1])
    plant(tmp_path / "p2", seed=2, wrong=range(20))
    found = compare_runs(load_collection([tmp_path]).groups[0]).comparisons["pgra", "sst2"]
    assert found.gap.difference == pytest.approx(1 / 40)
    assert (found.better, found.shared) == (1, 1)


def test_without_a_shared_seed_the_means_are_compared(tmp_path):
    """In-context learning has no reader to seed; it stands beside readers of three."""
    icl = plant(tmp_path / "i", method="icl", seed=42, wrong=range(8))
    readers = [plant(tmp_path / f"p{s}", method="plain", seed=s, wrong=range(s)) for s in (0, 2)]
    found = compare_runs(group_of(icl, *readers), baseline="plain").comparisons["icl", "sst2"]
    assert found.gap.difference == pytest.approx(-8 / 40 + 1 / 40)
    assert (found.better, found.shared) == (0, 2)  # no seed decides it: it stands beside each
    # 8 against 0 and 6 against 0 decisions: 2 / 2**8 and 2 / 2**6; the smaller of two, times 2.
    assert found.mcnemar == pytest.approx(2 * 2 / 2**8)


def test_holm_is_over_the_tasks_of_a_row(tmp_path):
    planted_gap(tmp_path, "sst2", seeds=(0,))
    planted_gap(tmp_path, "cr", seeds=(0,))
    plant(tmp_path / "mr/f", method="fid", task="mr", wrong=[1])
    plant(tmp_path / "mr/p", task="mr", wrong=[1])
    study = compare_runs(load_collection([tmp_path]).groups[0])
    assert study.tasks == ["sst2", "cr", "mr"]
    by_task = {task: study.comparisons["pgra", task] for task in study.tasks}
    smallest, second = sorted(by_task[task].gap.p for task in ("sst2", "cr"))
    adjusted = {by_task[task].holm for task in ("sst2", "cr")}
    assert adjusted == {3 * smallest, max(3 * smallest, 2 * second)}
    assert by_task["mr"].holm == 1.0


def test_the_average_is_of_each_seed_and_is_tested_over_all_tasks(tmp_path):
    planted_gap(tmp_path, "sst2")
    planted_gap(tmp_path, "cr")
    study = compare_runs(load_collection([tmp_path]).groups[0])
    assert study.results["pgra", AVERAGE].spread.n == 2
    assert study.results["pgra", AVERAGE].spread.mean == pytest.approx(0.94)
    found = study.comparisons["pgra", AVERAGE]
    assert found.gap.difference == pytest.approx(0.05)
    assert (found.better, found.shared) == (2, 2)
    assert found.is_win
    alone = study.comparisons["pgra", "cr"].gap
    assert found.gap.high - found.gap.low < 0.8 * (alone.high - alone.low)


def test_a_row_that_lacks_a_task_has_no_average(tmp_path):
    a, b = plant(tmp_path / "a"), plant(tmp_path / "b", method="fid")
    study = compare_runs(group_of(a, b, plant(tmp_path / "c", task="cr")))
    assert ("pgra", AVERAGE) in study.results
    assert not {("fid", "cr"), ("fid", AVERAGE)} & set(study.results)
    assert ("pgra", AVERAGE) not in study.comparisons


def test_the_baseline_is_the_named_one_else_fid_else_plain_else_none(tmp_path):
    runs = {s: plant(tmp_path / s, method=s) for s in ("icl", "plain", "fid", "pgra")}
    assert compare_runs(group_of(*runs.values())).baseline == "fid"
    assert compare_runs(group_of(*runs.values()), baseline="pgra").baseline == "pgra"
    assert compare_runs(group_of(runs["pgra"], runs["plain"])).baseline == "plain"
    alone = compare_runs(group_of(runs["pgra"], runs["icl"]))
    assert (alone.baseline, alone.comparisons) == (None, {})
    with pytest.raises(ConfigError, match="unknown baseline 'rag'"):
        compare_runs(group_of(*runs.values()), baseline="rag")


def test_a_grid_has_its_points_in_order_its_baseline_and_what_is_missing(tmp_path):
    points = {
        "k=50": {"value": 50, "seeds": {0: None, 1: None}},
        "k=16": {"value": 16, "seeds": {0: [1], 1: None}},
        "k=8": {"value": 8, "seeds": {0: [1, 2], 1: [1]}},
    }
    root = plant_grid(tmp_path / "g", points, baseline={"retriever.num_candidates": 8})
    study = compare_runs(load_collection([root]).groups[0])
    assert study.rows == ["k=50", "k=16", "k=8"]
    assert study.baseline == "k=8"
    assert ("k=50", "sst2") not in study.results
    assert list(study.results["k=16", "sst2"].missing) == [1]
    assert set(study.comparisons) == {("k=16", "sst2")}


def test_seeds_that_differ_have_an_interval_over_seeds_equal_ones_over_examples(tmp_path):
    """k-NN decides alike with every seed: an interval of no width would say too much."""
    for seed in (0, 1, 2):
        plant(tmp_path / f"knn{seed}", method="knn", seed=seed, wrong=range(10))
    for seed in (0, 1):
        plant(tmp_path / f"fid{seed}", method="fid", seed=seed, wrong=range(10 + 2 * seed))
    results = compare_runs(load_collection([tmp_path]).groups[0]).results
    low, high = results["fid", "sst2"].interval
    assert results["fid", "sst2"].is_over_seeds
    assert high - low == pytest.approx(2 * 12.706 * 0.025, rel=1e-3)  # t of 1, and sd / sqrt(2)
    assert not results["knn", "sst2"].is_over_seeds
    assert results["knn", "sst2"].interval[0] < 0.7 < 0.8 < results["knn", "sst2"].interval[1]


def test_an_average_of_one_seed_has_the_interval_over_examples(tmp_path):
    """Two independent tasks of one spread: theirs over the square root of two."""
    for task in ("sst2", "cr"):
        plant(tmp_path / task, task=task, n=400, wrong=range(80), text=task)
    study = compare_runs(load_collection([tmp_path]).groups[0])
    average, alone = study.results["pgra", AVERAGE], study.results["pgra", "cr"]
    assert not average.is_over_seeds
    widths = [high - low for low, high in (average.interval, alone.interval)]
    assert widths[0] == pytest.approx(widths[1] / 2**0.5, rel=0.1)
    assert average.interval[0] < 0.8 < average.interval[1]
