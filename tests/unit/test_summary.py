import pytest
from planted_runs import places, plant, plant_grid

from pgra.errors import ConfigError
from pgra.report.compare import (
    compare_runs,
    detail_table,
    load_reference,
    long_table,
    results_table,
)
from pgra.report.results import load_collection

HALF = places(200, 0.15, 0)


def study_of(root, reference=None, **more):
    table = load_reference(reference) if reference else None
    return compare_runs(load_collection([root]).groups[0], reference=table, **more)


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        more = [i for i in range(seed, 200, 9) if i not in HALF][:18]
        plant(root / f"f{seed}", method="fid", seed=seed, n=200, wrong=HALF + more[seed:])
        plant(root / f"p{seed}", seed=seed, n=200, wrong=HALF[seed:], notes=["bundled: small"])
    plant(root / "t", method="plain", task="trec", n=10, wrong=[0])
    return root


def test_rows_are_systems_columns_are_tasks_with_the_papers_beside(planted):
    table = results_table(study_of(planted, "T2a"))
    assert table.columns == [
        *("method", "sst2", "sst2 (paper)", "trec", "trec (paper)", "average", "average (paper)")
    ]
    assert texts(table) == [
        ["plain", "missing", "91.3", "90.0", "80.4", "missing", "85.8"],
        ["fid", "76.2 ± 0.4", "92.2", "missing", "80.8", "missing", "86.5"],
        ["pgra", "85.2 ± 0.4", "93.9", "missing", "80.8", "missing", "87.3"],
    ]


def test_only_a_win_beyond_noise_is_bold(planted):
    bold = [cell.is_bold for cell in column(results_table(study_of(planted)), "sst2")]
    assert bold == [False, False, True]
    against = study_of(planted, baseline="pgra")
    assert not any(cell.is_bold for row in results_table(against).rows for cell in row)


def test_notes_tell_artefacts_settings_and_what_runs_say(planted):
    table = results_table(study_of(planted, "T2a"))
    told = "\n".join(table.notes)
    for words in ("81.2 is the ceiling", "Table 2, T5-base", "bundled: small", "better than fid"):
        assert words in told
    assert "81.2" not in "\n".join(results_table(study_of(planted)).notes)


@pytest.mark.parametrize("name", ["T7", "T10", "T10acc"])
def test_a_reference_of_something_else_is_refused(planted, name):
    with pytest.raises(ConfigError, match=rf"reference {name} .* not the tasks' metrics"):
        study_of(planted, name)


def test_details_give_the_interval_the_difference_and_the_papers(planted):
    table = detail_table(study_of(planted, "T2a"))
    row = dict(zip(table.columns, texts(table)[6], strict=True))
    assert (row["method"], row["task"]) == ("pgra", "sst2")
    assert row["over"] == "seeds"
    assert row["difference"] == "+9.0"
    assert row["seeds better"] == "2 of 2"
    assert row["paper's difference"] == "+1.7"
    assert [cell.text for cell in column(table, "over")] == [
        *("", "examples", "", "seeds", "", "", "seeds", "", "")
    ]
    assert [cell.text for cell in column(table, "value")][:2] == ["missing", "90.0"]


def test_missing_points_of_a_grid_are_missing_and_never_0(tmp_path):
    points = {
        "k=16": {"value": 16, "seeds": {0: [1], 1: None}},
        "k=50": {"value": 50, "seeds": {0: None, 1: None}},
    }
    root = plant_grid(tmp_path / "g", points, reference="T5")
    study = study_of(root, "T5")
    table = results_table(study)
    assert texts(table) == [["k=16", "97.5 (1 of 2 seeds)", "93.6"], ["k=50", "missing", ""]]
    assert "Missing: 3 run(s) of the grid." in table.notes
    numbers = [row for row in long_table(study).rows if row[1].text == "k=50"]
    assert [cell.value for cell in numbers[0]] == [None] * len(numbers[0])
    assert not any(cell.text == "0" for cell in numbers[0])


def test_the_long_table_has_a_row_for_each_row_and_task_unrounded(planted):
    study = study_of(planted, "T2a")
    table = long_table(study)
    assert len(table.rows) == 3 * 3
    row = dict(zip(table.columns, table.rows[6], strict=True))
    assert row["value"].value == pytest.approx(85.25)
    assert row["p_holm"].value == study.comparisons["pgra", "sst2"].holm
    assert (row["seeds"].text, row["n"].text, row["paper"].value) == ("0 1", "200", 93.9)
