"""A grid as a YAML tells it: points, names, layers, and what is refused."""

import re
from pathlib import Path

import pytest
import yaml

from pgra.config import Defaults, RerankArguments, RetrieverArguments, parse_arguments
from pgra.errors import ConfigError
from pgra.experiments.grid import Point, grid_names, read_axes, read_grid, short

ABLATIONS = Path(__file__).parents[2] / "ablations"


@pytest.fixture
def write(tmp_path):
    def write(name="mine", **values):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return str(path)

    return write


def test_points_are_all_combinations_in_the_order_given(write):
    path = write(
        grid={"num_candidates": [9, 5], "similarity": ["dot", "cosine"]},
        labels={"num_candidates": "k", "similarity": ""},
    )
    grid = read_grid(path)
    assert [point.name for point in grid.points] == [
        *("k=9, dot", "k=9, cosine", "k=5, dot", "k=5, cosine")
    ]
    assert grid.points[1].values == {"num_candidates": 9, "similarity": "cosine"}
    assert grid.points[1].folder == "k=9-cosine"
    assert grid.axes == ("num_candidates", "similarity")
    assert grid.seeds == (0, 1, 2)


def test_values_that_go_together_are_crossed_with_the_axes(write):
    path = write(
        points=[{"name": "BM25", "retriever": "bm25"}, {"retriever": "dense", "pooling": "cls"}],
        grid={"method": ["fid", "pgra"]},
        labels={"method": ""},
    )
    names = [point.name for point in read_grid(path).points]
    assert names == [
        *("BM25, fid", "BM25, pgra"),
        *("retriever=dense, pooling=cls, fid", "retriever=dense, pooling=cls, pgra"),
    ]
    alone = read_grid(write("one", base={"num_evidence": 2}))
    assert [point.name for point in alone.points] == ["one"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (True, "yes"),
        (None, "none"),
        (1e-4, "0.0001"),
        ("facebook/opt-350m", "opt-350m"),
        ("bundled:minilm-l6", "minilm-l6"),
        (150, "150"),
    ],
)
def test_values_have_short_names(value, told):
    assert short(value) == told


def test_a_demo_replaces_points_and_stands_over_the_base(write):
    path = write(
        base={"num_evidence": 16, "similarity": "cosine"},
        tasks=["sst2", "trec"],
        by_task={"trec": {"learning_rate": 1e-5}},
        grid={"num_candidates": [150, 50]},
        demo={"base": {"num_evidence": 4}, "grid": {"num_candidates": [8]}, "tasks": ["mr"]},
    )
    grid, small = read_grid(path), read_grid(path, demo=True)
    assert grid.base == {"num_evidence": 16, "similarity": "cosine"}
    assert grid.by_task == {"trec": {"learning_rate": 1e-5}}
    assert small.base == {"num_evidence": 4, "similarity": "cosine"}
    assert (small.tasks, small.by_task) == (("mr",), {})
    assert [point.name for point in small.points] == ["num_candidates=8"]


def test_a_yaml_stands_over_the_one_it_extends_and_so_do_their_demos(write):
    write("low", base={"num_evidence": 1, "num_exemplars": 2}, demo={"base": {"num_evidence": 3}})
    path = write("high", extends="low", base={"num_evidence": 5}, demo={"grid": {"seed_x": [1]}})
    assert read_grid(path).base == {"num_evidence": 5, "num_exemplars": 2}
    with pytest.raises(ConfigError, match="unknown axis 'seed_x'"):
        read_grid(path, demo=True)
    write("third", extends="high")
    with pytest.raises(ConfigError, match="extends high, which extends another: one step is all"):
        read_grid(write("third", extends="high"))


def parsed(grid, *words, task="trec", at=0):
    """Give k, d and m of a point, as the command reads them."""
    retriever, rerank = parse_arguments(
        [RetrieverArguments, RerankArguments],
        list(words),
        prog="test",
        description="",
        under=grid.under(task, grid.points[at]),
        over=[grid.over(task, grid.points[at])],
    )
    return retriever.num_candidates, rerank.num_evidence, rerank.num_exemplars


def test_the_command_line_wins_over_the_point_over_files_over_the_base(write, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("num_candidates: 77\nnum_evidence: 7\nnum_exemplars: 6\n")
    path = write(
        base={"num_evidence": 5, "num_exemplars": 4, "num_candidates": 60},
        by_task={"trec": {"num_exemplars": 3}},
        grid={"num_candidates": [50]},
    )
    grid = read_grid(path)
    assert parsed(grid, task="sst2") == (50, 5, 4)
    assert parsed(grid) == (50, 5, 3)
    assert parsed(grid, "--config", str(config)) == (50, 7, 6)
    assert parsed(grid, "--config", str(config), "--num_evidence", "2") == (50, 2, 6)
    assert parsed(grid, "--num_candidates", "40")[0] == 40  # the command refuses it before


def test_a_profile_stands_beneath_the_base(write):
    path = write(base={"num_exemplars": 4}, points=[{"profile": "official"}, {"profile": "pgra"}])
    grid = read_grid(path)

    def rerank(at):
        return parse_arguments(
            [RerankArguments],
            [],
            prog="test",
            description="",
            under=grid.under(None, grid.points[at]),
        )[0]

    assert (rerank(0).similarity, rerank(0).exemplars) == ("cosine", "official")
    assert (rerank(1).similarity, rerank(1).exemplars) == ("dot", "balanced")
    assert rerank(0).num_exemplars == rerank(1).num_exemplars == 4


def test_a_point_may_differ_for_one_task(write):
    given = {"name": "x", "similarity": "dot", "by_task": {"trec": {"similarity": "cosine"}}}
    grid = read_grid(write(points=[given]))
    values = {task: grid.over(task, grid.points[0]).values for task in ("trec", "mr")}
    assert values == {
        "trec": {"similarity": "cosine", "task": "trec"},
        "mr": {"similarity": "dot", "task": "mr"},
    }


def test_axes_of_the_command_line_replace_the_yamls(write):
    assert read_axes(["num-candidates=9,5", "similarity=dot", "learning_rate=1.0e-4,null"]) == {
        "num_candidates": [9, 5],
        "similarity": ["dot"],
        "learning_rate": [1e-4, None],
    }
    path = write(grid={"num_candidates": [150], "num_evidence": [2]})
    grid = read_grid(path, axes=read_axes(["num_candidates=9,5"]))
    assert [point.values for point in grid.points] == [
        {"num_candidates": 9, "num_evidence": 2},
        {"num_candidates": 5, "num_evidence": 2},
    ]
    for word in ("num_candidates", "num_candidates=", "num_candidates=[1"):
        with pytest.raises(ConfigError, match="write NAME=VALUE,VALUE such as num_evidence=4,8"):
            read_axes([word])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grid": {"num_candidate": [1]}}, "unknown axis 'num_candidate'. Did you mean 'num_cand"),
        ({"grid": {"k": 3}}, "axis k must be a list of values, not 3"),
        ({"grid": {"num_evidence": []}}, "axis num_evidence must be a list of values"),
        ({"grid": {"seed": [1]}}, "'seed' cannot be an axis: give --seeds or --tasks"),
        ({"grids": {}}, "unknown key 'grids'. Did you mean 'grid'"),
        ({"demo": {"bas": {}}}, "demo: unknown key 'bas'. Did you mean 'base'"),
        ({"demo": 3}, "demo must be a mapping"),
        ({"base": [1]}, "base must be a mapping of names to values"),
        ({"points": {"a": 1}}, "points must be a list"),
        ({"points": ["a"]}, "a point must be a mapping, not 'a'"),
        ({"baseline": {"numcandidates": 1}}, "unknown argument of the baseline 'numcandidates'"),
        ({"points": [{"profile": "offical"}]}, "unknown profile 'offical'. Did you mean 'offici"),
        ({"grid": {"num_evidence": [2, 2]}}, "points 'num_evidence=2' and 'num_evidence=2' would"),
        ({"grid": {"lm": ["a/x", "b/x"]}}, "points 'lm=x' and 'lm=x' would share the folder"),
        ({"seeds": [0, 0]}, "seeds holds 0 twice"),
    ],
)
def test_what_is_no_grid_is_refused(write, values, message):
    with pytest.raises(ConfigError, match=message):
        read_grid(write(**values))


def test_an_unknown_grid_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown grid 'retreiver'. Did you mean 'retriever'"):
        read_grid("retreiver")
    with pytest.raises(ConfigError, match="cannot read none.yaml"):
        read_grid("none.yaml")


def test_folders_hold_no_odd_characters():
    assert Point("FiD (BM25), k=3/../x", {}).folder == "FiD-BM25-k=3-..-x"


@pytest.mark.parametrize("demo", [False, True], ids=["paper", "demo"])
@pytest.mark.parametrize("name", grid_names())
def test_every_shipped_grid_is_read_and_says_what_it_is(name, demo):
    grid = read_grid(name, demo=demo)
    assert grid.points
    assert grid.tasks
    assert grid.title != name
    assert grid.about
    told = [Defaults(grid.origin, {})]
    assert type(grid.under(None, grid.points[0])) is type(told)


def test_the_example_in_the_docs_is_a_grid(tmp_path):
    text = (Path(__file__).parents[2] / "docs/ablations.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.S | re.M)
    (tmp_path / "mine.yaml").write_text(block)
    grid = read_grid(str(tmp_path / "mine.yaml"))
    assert [point.name for point in grid.points] == [
        *("ours, k=150, dot", "ours, k=150, cosine", "ours, k=50, dot", "ours, k=50, cosine"),
        *("theirs, k=150, dot", "theirs, k=150, cosine", "theirs, k=50, dot"),
        "theirs, k=50, cosine",
    ]
    assert grid.tasks == ("sst2", "mr")
    assert len(read_grid(str(tmp_path / "mine.yaml"), demo=True).points) == 8


@pytest.mark.parametrize("path", sorted(ABLATIONS.glob("*.py")), ids=lambda path: path.stem)
def test_a_file_of_ablations_runs_the_grid_of_its_name(path):
    if path.stem not in ("evidence", "label_consistency"):  # which train nothing
        assert f'run(main, ["{path.stem}", *sys.argv[1:]])' in path.read_text()
        assert path.stem in grid_names()
    assert f"`{path.name}`" in (ABLATIONS / "README.md").read_text()


def test_there_is_a_grid_for_what_the_paper_varies():
    assert {
        *("main", "large", "icl", "k", "d", "fid_d", "opt_size", "retriever", "granularity"),
        *("exemplars", "similarity", "seeds", "training_cost", "profiles", "label_consistency"),
        *("fever",),
    } <= set(grid_names())
