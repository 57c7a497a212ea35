import csv

import pytest
from planted_runs import plant, plant_grid

from pgra.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        plant(root / f"fid-{seed}", method="fid", seed=seed, wrong=range(20))
        plant(root / f"pgra-{seed}", seed=seed, wrong=range(2))
    return root


def test_a_folder_of_runs_is_a_table_in_the_terminal_or_a_file(runs, tmp_path, capsys):
    assert main(["report", str(runs), "--reference", "T2a"]) == 0
    shown = capsys.readouterr().out
    assert "pgra    95.0 ± 0.0*          93.9" in shown
    assert "Results: every value, and its difference to fid" in shown
    assert main(["report", str(runs), "--output", str(tmp_path / "new" / "a.md")]) == 0
    assert "| pgra   | **95.0 ± 0.0** |" in (tmp_path / "new" / "a.md").read_text()


def test_csv_has_all_numbers_of_all_groups_and_a_figure_is_of_one(runs, tmp_path, capsys):
    points = {"k=50": {"value": 50, "seeds": {0: [1]}}}
    grid = str(plant_grid(tmp_path / "g", points, reference="T5"))
    assert main(["report", grid]) == 0
    assert "sst2 (paper)" in capsys.readouterr().out  # which the grid names by itself
    words = ["report", str(runs), grid, "--output"]
    assert main([*words, str(tmp_path / "a.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [(row["table"], row["row"], float(row["value"])) for row in rows] == [
        *(("Candidates", "k=50", 97.5), ("Results", "fid", 50.0), ("Results", "pgra", 95.0))
    ]
    assert main([*words, str(tmp_path / "a.png")]) == 2
    assert not (tmp_path / "a.png").exists()
    assert main([*words, str(tmp_path / "a.md"), "--samples", "1"]) == 2
