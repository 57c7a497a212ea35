"""A grid as a YAML tells it: points, names, layers, and what is refused."""

import re
from pathlib import Path

import pytest
import yaml

from pgra.commands.common import parse_run
from pgra.errors import ConfigError
from pgra.experiments.grid import argument_names, read_grid


@pytest.fixture
def write(tmp_path):
    def write(name="mine", **values):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return str(path)

    return write


def test_points_are_all_combinations_with_the_axes(write):
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
    points = [{"name": "BM25", "retriever": "bm25"}, {"retriever": "dense", "pooling": "cls"}]
    path = write(points=points, grid={"method": ["fid"]}, labels={"method": ""})
    names = [point.name for point in read_grid(path).cells]
    assert names == ["BM25, fid", "retriever=dense, pooling=cls, fid"]
    (alone,) = read_grid(write("one", base={"num_evidence": 2})).cells
    assert alone.name == "one"


def test_a_file_stands_over_the_one_it_extends(write):
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
    with pytest.raises(ConfigError, match="loop"):
        read_grid(write("loop", extends="loop"))
    with pytest.raises(ConfigError, match="seed"):
        read_grid(write("seeds", grid={"seed": [1, 2]}))


def parsed(grid, *words, task="trec", at=0):
    layers = [*grid.under(task, grid.cells[at]), grid.over(task, grid.cells[at])]
    names = argument_names(grid)
    args, _ = parse_run(parsed, "test", words, others=names, defaults=layers)
    rerank = args["rerank"]
    found = rerank.num_evidence, rerank.num_exemplars, rerank.similarity
    return args["retriever"].num_candidates, *found


def test_the_order_of_layers_from_profile_to_command_line(write, tmp_path):
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


def test_the_example_in_the_docs_is_a_grid(tmp_path):
    text = (Path(__file__).parents[2] / "docs/reproduce.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.S | re.M)
    (tmp_path / "mine.yaml").write_text(block)
    for demo in (False, True):
        grid = read_grid(str(tmp_path / "mine.yaml"), demo=demo)
        assert len({point.name for point in grid.cells}) == 8
