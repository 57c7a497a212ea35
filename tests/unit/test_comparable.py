"""Which runs may stand in one table, and the names of its rows."""

import pytest
from planted_runs import load_run, plant, plant_grid

from pgra.errors import ArtifactError
from pgra.report.results import Group, check_comparable, load_collection, row_names


def group_of(root, *runs):
    return Group("Results", [load_run(plant(root / str(i), **run)) for i, run in enumerate(runs)])


def marks(**changes):
    return {"fingerprints": {"train": "a" * 64, "dev": "b" * 64, "test": "c" * 64, **changes}}


def having(section, **values):
    return {"arguments": {section: values}}


FID = {"method": "fid"}
NO_PROMPT = {"method": "Mine", "set_aside": 0, **having("rerank", reranker="mine:Rank")}
FEW, ALL = (having("data", max_train_samples=count) for count in (16, None))


@pytest.mark.parametrize(
    "runs",
    [
        (FID, {"wrong": [1, 2]}, {"task": "cr", "n": 10, "text": "other"}),
        (ALL, {"method": "icl", **FEW}),  # what is not trained has no division to compare
        # The examples that stand in the prompt are not trained on, so train differs with them.
        ({}, {**having("rerank", num_exemplars=4), **marks(train="d" * 64)}),
        ({}, {**FID, **marks(train="d" * 64)}),  # nor is there a prompt: it trains on all
        ({}, {**NO_PROMPT, **marks(train="d" * 64)}),  # nor has a reranker from outside one
    ],
)
def test_runs_on_one_test_set_and_division_may_stand_together(tmp_path, runs):
    check_comparable(group_of(tmp_path, *runs))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((FID, {"text": "others"}), "test"),
        ((FID, {"metric": "mcc"}), "accuracy, mcc"),
        ((FID, having("data", split_seed=1)), "split_seed"),
        ((ALL, {"method": "Mine", **FEW}), "max_train_samples"),  # a class from outside
        ((FID, marks(dev="d" * 64)), "dev"),
        (({}, {**NO_PROMPT, "set_aside": 8, **marks(train="d" * 64)}), "train"),
        (
            (marks(corpus="1" * 64), {**marks(corpus="2" * 64), "seed": 1}),
            "11111111, 2",
        ),
        (({}, {}), "same"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_and_both_named(tmp_path, runs, message):
    with pytest.raises(ArtifactError, match=message) as caught:
        check_comparable(group_of(tmp_path, *runs))
    assert str(caught.value).startswith(f"{tmp_path / '0'} and {tmp_path / '1'} ")


def test_a_grid_may_vary_the_data_it_says_it_varies(tmp_path):
    points = {"few": {"value": 8, "seeds": {0: []}}, "many": {"value": 80, "seeds": {0: []}}}
    root = plant_grid(tmp_path / "g", points, axis="max_train_samples", section="data")
    check_comparable(load_collection([root])[0])
    with pytest.raises(ArtifactError, match=r"max_train_samples \(8, 80\)"):
        check_comparable(load_collection([root / "sst2"])[0])


K16, SLOW = having("retriever", num_candidates=16), having("training", learning_rate=2e-5)
OLD, NEW = (having("corpus", corpus=f"{folder}/wiki.txt") for folder in ("old", "new"))


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (
            ({}, K16, {"seed": 1}, {**FID, **having("rerank", num_evidence=4)}),
            ["pgra num_candidates=150", "pgra num_candidates=16", "pgra num_candidates=150", "fid"],
        ),
        ((OLD, NEW), ["pgra corpus=old/wiki.txt", "pgra corpus=new/wiki.txt"]),
        # The paper's learning rates are a task's own (Table 7): of two tasks they make no rows.
        (({}, {"task": "sst5", **SLOW}), ["pgra", "pgra"]),
        # Where and how fast a run was makes no row, nor does what a method does not look at.
        (({}, {"seed": 1, **having("rerank", lm_batch_tokens=9)}), ["pgra", "pgra"]),
        (({"method": "plain"}, {"method": "plain", "seed": 1, **K16}), ["plain", "plain"]),
    ],
)
def test_a_row_is_the_method_with_its_differing_settings(tmp_path, runs, names):
    assert row_names(group_of(tmp_path, *runs)) == names
