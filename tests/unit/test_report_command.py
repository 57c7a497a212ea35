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
    for name, words in (
        ("a.md", "| pgra   | **95.0 ± 0.0** |"),
        ("a.tex", r"\textbf{95.0 $\pm$ 0.0}"),
    ):
        assert main(["report", str(runs), "--output", str(tmp_path / "new" / name)]) == 0
        assert words in (tmp_path / "new" / name).read_text()


def test_csv_has_all_numbers_of_all_groups_and_a_figure_is_of_one(runs, tmp_path, capsys):
    plant_grid(tmp_path / "g", {"k=8": {"value": 8, "seeds": {0: [1]}}})
    words = ["report", str(runs), str(tmp_path / "g")]
    assert main([*words, "--output", str(tmp_path / "a.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [(row["table"], row["row"], float(row["value"])) for row in rows] == [
        *(("Candidates", "k=8", 97.5), ("Results", "fid", 50.0), ("Results", "pgra", 95.0))
    ]
    assert main([*words, "--output", str(tmp_path / "a.png")]) == 2
    assert "is of one table, and there are 'Candidates', 'Results'" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_a_list_grids_the_papers_table_by_itself(tmp_path, capsys):
    root = plant_grid(tmp_path, {"k=50": {"value": 50, "seeds": {0: [1]}}}, reference="T5")
    assert main(["report", str(root)]) == 0
    assert "sst2 (paper)" in capsys.readouterr().out
    assert main(["report", str(root), "--reference", "none"]) == 0
    assert "(paper)" not in capsys.readouterr().out
