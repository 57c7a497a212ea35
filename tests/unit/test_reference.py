import pytest
from planted_runs import load_run, plant

from pgra.report.compare import AVERAGE, load_reference, load_references

TASKS = ["sst2", "sst5", "cola", "trec", "cr", "mr", "mpqa", "subj"]
# Which printed averages are not those of the printed cells, by more than rounding: the notes say.
ODD = {("T2a", "k-NN"), ("T10", "OPT 1.3b")}


def test_every_table_and_figure_of_the_paper_is_there():
    assert {"T2a", "T2b", "T2c", "T4", "T5", "T6", "T7", "T8", "T9", "T10", "T11", "AppF"} <= set(
        load_references()
    )
    assert load_reference("T5").rows["k=50"]["cola"] == 58.9
    assert load_reference("AppF").rows["PGRA"]["fever"] == 77.7
    assert load_reference("kate_t4").rows["kNN (roberta)"]["totto nonoverlap/parent"] == 7.52


@pytest.mark.parametrize("name", sorted(load_references()))
def test_printed_averages_are_those_of_the_cells_but_for_two(name):
    table = load_references()[name]
    assert table.match.keys() <= table.rows.keys()
    tasks = [column for column in table.columns if column != AVERAGE]
    for row, cells in table.rows.items():
        if AVERAGE not in table.columns or not tasks or row.endswith("sd"):
            continue
        mean = sum(cells[task] for task in tasks) / len(tasks)
        is_odd = abs(mean - cells[AVERAGE]) > 0.0501
        assert is_odd == ((name, row) in ODD), (row, mean)


def test_the_printed_average_stands_beside_all_of_its_tasks_alone(tmp_path):
    run = load_run(plant(tmp_path / "a", method="lm-bff"))
    beside = load_reference("T2a").beside
    assert beside(run, TASKS, [*TASKS, AVERAGE])[AVERAGE] == 69.9
    assert beside(run, ["sst2", "cr"], ["sst2", AVERAGE]) == {"sst2": 86.0}


def test_a_run_stands_beside_the_row_that_matches_most_of_it(tmp_path):
    big = {"reader": {"model_name_or_path": "google-t5/t5-large"}}
    base, fid = load_run(plant(tmp_path / "a")), load_run(plant(tmp_path / "c", method="fid"))
    large = load_run(plant(tmp_path / "b", arguments=big))
    k = load_run(plant(tmp_path / "d", arguments={"retriever": {"num_candidates": 50}}))
    assert load_reference("T8").find_row(base) == "T5-base average"
    assert load_reference("T8").find_row(large) == "T5-large average"
    assert [load_reference("T5").find_row(run) for run in (k, base, fid)] == ["k=50", "k=150", None]


@pytest.mark.parametrize(
    ("table", "row", "method", "papers", "other"),
    [
        ("T2a", "k-NN", "knn", {"neighbor_encoder": "reader"}, {"neighbor_encoder": "encoder"}),
        ("T2a", "RAG", "rag", {"normalize": False}, {"normalize": True}),
        (
            "kate_t3",
            "kNN (roberta)",
            "vote-knn",
            {"encoder": "FacebookAI/roberta-large"},
            {"encoder": "a/b"},
        ),
    ],
)
def test_a_row_made_otherwise_has_no_number_of_the_papers(
    tmp_path, table, row, method, papers, other
):
    reference = load_reference(table)
    for folder, values, expected in (("a", papers, row), ("b", other, None)):
        run = load_run(plant(tmp_path / folder, method=method, arguments={"retriever": values}))
        assert reference.find_row(run) == expected
