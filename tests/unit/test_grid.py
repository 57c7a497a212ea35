"""A grid as a YAML tells it: points, names, layers, and what is refused."""

import re
from pathlib import Path

import pytest
import yaml

from pgra.commands.common import parse_run
from pgra.config import config_root, list_yamls, read_yaml
from pgra.errors import ConfigError
from pgra.experiments.grid import argument_names, read_grid


@pytest.fixture
def write(tmp_path):
    def write(name="mine", **values):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return str(path)

    return write


def test_points_are_all_combinations_of_what_goes_together_with_the_axes(write):
    path = write(
        grid={"num_candidates": [9, 5], "similarity": ["dot", "cosine"]},
        labels={"num_candidates": "k", "similarity": ""},
    )
    grid = read_grid(path)
    assert [point.name for point in grid.cells] == [
        *("k=9, dot", "k=9, cosine", "k=5, dot", "k=5, cosine")
    ]
    assert grid.cells[1].values == {"num_candidates": 9, "similarity": "cosine"}
    assert grid.cells[1].folder == "k=9-cosine"
    assert grid.axes == ["num_candidates", "similarity"]
    assert list(grid.seeds) == [0, 1, 2]
    points = [{"name": "BM25", "retriever": "bm25"}, {"retriever": "dense", "pooling": "cls"}]
    path = write(points=points, grid={"method": ["fid"]}, labels={"method": ""})
    names = [point.name for point in read_grid(path).cells]
    assert names == ["BM25, fid", "retriever=dense, pooling=cls, fid"]
    (alone,) = read_grid(write("one", base={"num_evidence": 2})).cells
    assert alone.name == "one"


def test_a_demo_stands_over_the_base_and_a_file_over_the_one_it_extends(write, tmp_path):
    below = {"base": {"num_evidence": 4, "lm": "x"}, "by_task": {"trec": {"max_steps": 9}}}
    write("below", **below, grid={"num_candidates": [150]}, demo={"base": {"lm": "y"}})
    small = {"base": {"num_evidence": 2}, "grid": {"num_candidates": [8]}, "tasks": ["mr"]}
    write("above", extends="below", base={"num_evidence": 8}, demo=small)
    path = write("third", extends="above")
    grid, small = read_grid(path), read_grid(path, demo=True)
    assert (grid.base, grid.by_task) == ({"num_evidence": 8, "lm": "x"}, below["by_task"])
    assert small.base == {"num_evidence": 2, "lm": "y"}
    assert [point.name for point in small.cells] == ["num_candidates=8"]
    assert (list(small.tasks), small.by_task) == (["mr"], {})
    (tmp_path / "inner").mkdir()
    assert read_grid(write("inner/one", extends="../third")).base == grid.base
    with pytest.raises(ConfigError, match="extends itself"):
        read_grid(write("loop", extends="loop"))
    with pytest.raises(ConfigError, match="seed and task cannot be axes"):
        read_grid(write("seeds", grid={"seed": [1, 2]}))


def parsed(grid, *words, task="trec", at=0):
    layers = {"under": grid.under(task, grid.cells[at]), "over": [grid.over(task, grid.cells[at])]}
    args, _ = parse_run(words, prog="", description="", others=argument_names(grid), **layers)
    rerank = args["rerank"]
    found = rerank.num_evidence, rerank.num_exemplars, rerank.similarity
    return args["retriever"].num_candidates, *found


def test_the_command_line_wins_over_the_point_over_files_over_the_base_over_profiles(
    write, tmp_path
):
    config = tmp_path / "config.yaml"
    config.write_text("num_candidates: 77\nnum_evidence: 7\nnum_exemplars: 6\n")
    path = write(
        base={"num_evidence": 5, "num_exemplars": 4, "num_candidates": 60},
        by_task={"trec": {"num_exemplars": 3}},
        points=[{"profile": "official"}, {"profile": "pgra"}],
        grid={"num_candidates": [50]},
    )
    grid = read_grid(path)
    assert parsed(grid, task="sst2") == (50, 5, 4, "cosine")
    assert parsed(grid, at=1) == (50, 5, 3, "dot")
    assert parsed(grid, "--config", str(config))[:3] == (50, 7, 6)
    words = ["--config", str(config), "--num_evidence", "2", "--num_candidates", "40"]
    assert parsed(grid, *words)[:3] == (40, 2, 6)


@pytest.mark.parametrize("name", ["main", "large"])
def test_the_row_of_lm_bff_is_its_experiment(name):
    """The paper ran it in "the same configuration as Gao et al.", by their five seeds."""
    path = config_root() / "experiments/lm-bff.yaml"
    seeds = re.findall(r"--seeds ([\d ]+)", path.read_text())[0].split()
    point = next(cell for cell in read_grid(name).cells if cell.name == "LM-BFF")
    assert {**read_yaml(path), **point.values} == {**point.values, **read_yaml(path)}
    assert point.values["max_steps"] == 1000
    assert list(map(str, point.seeds)) == seeds


@pytest.mark.parametrize("name", list_yamls("ablations"))
def test_every_shipped_grid_is_read_and_says_what_it_is(name):
    for demo in (False, True):
        grid = read_grid(name, demo=demo)
        assert grid.tasks
        assert grid.title != name
        assert grid.about
        for point in grid.cells:
            layers = [*grid.under(grid.tasks[0], point), grid.over(grid.tasks[0], point)]
            values = {name: value for layer in layers for name, value in layer.values.items()}
            is_asked = values.get("decide_by") != "vote" and values.get("method") in ("icl", "kate")
            assert "lm" in values or not is_asked  # there is no default: the paper's is named


def test_the_example_in_the_docs_is_a_grid(tmp_path):
    text = (Path(__file__).parents[2] / "docs/reproduce.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.S | re.M)
    (tmp_path / "mine.yaml").write_text(block)
    for demo in (False, True):
        grid = read_grid(str(tmp_path / "mine.yaml"), demo=demo)
        assert len({point.name for point in grid.cells}) == 8
