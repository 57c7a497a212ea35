import pytest
from planted_runs import plant, plant_grid

from pgra.errors import ArtifactError
from pgra.report.results import (
    TASK_ORDER,
    Group,
    check_comparable,
    in_order,
    load_collection,
    load_run,
    row_names,
)


def group_of(*folders, **more):
    return Group("Results", [load_run(folder) for folder in folders], **more)


def fingerprints(**changes):
    return {"train": "a" * 64, "dev": "b" * 64, "test": "c" * 64, **changes}


def test_methods_on_one_test_set_and_division_may_stand_together(tmp_path):
    check_comparable(
        group_of(
            plant(tmp_path / "a", method="fid"),
            plant(tmp_path / "b", wrong=[1, 2]),
            plant(tmp_path / "c", task="cr", n=10, text="other"),
        )
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"n": 42}, r"another test set \(fingerprint [0-9a-f]{8}, n = 40; [0-9a-f]{8}, n = 42\)"),
        ({"text": "others"}, "another test set"),
        ({"metric": "mcc"}, r"another metric \(accuracy, mcc\)"),
        ({"split": "dev"}, r"another split \(test, dev\)"),
        ({"arguments": {"data": {"split_seed": 1}}}, r"another split rule \(split_seed 0, 1\)"),
        ({"arguments": {"data": {"max_train_samples": 99}}}, r"max_train_samples None, 99"),
        ({"fingerprints": fingerprints(dev="d" * 64)}, r"another split rule \(other dev examples"),
        (
            {"fingerprints": fingerprints(train="d" * 64)},
            "other train examples: aaaaaaaa, dddddddd",
        ),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_and_both_named(tmp_path, other, message):
    a, b = plant(tmp_path / "a", method="fid"), plant(tmp_path / "b", **other)
    with pytest.raises(ArtifactError, match=message) as caught:
        check_comparable(group_of(a, b))
    told = str(caught.value)
    assert told.startswith(f"{a} and {b} cannot stand in one table, task sst2: ")
    assert told.endswith("report them apart, or run one again")


def test_neighbors_are_of_the_training_data_that_readers_have(tmp_path):
    other = {"arguments": {"data": {"max_train_samples": 16}}}
    readers = [plant(tmp_path / "a"), plant(tmp_path / "b", method="knn")]
    check_comparable(group_of(*readers))  # the control
    with pytest.raises(ArtifactError, match=r"another split rule \(max_train_samples None, 16\)"):
        check_comparable(group_of(*readers, plant(tmp_path / "c", method="knn", **other)))


def test_seeds_on_another_corpus_of_the_same_name_are_refused(tmp_path):
    one, other = fingerprints(corpus="1" * 64), fingerprints(corpus="2" * 64)
    runs = [plant(tmp_path / f"{i}", seed=i, fingerprints=one) for i in (0, 1)]
    check_comparable(group_of(*runs))  # the control
    runs.append(plant(tmp_path / "2", seed=2, fingerprints=other))
    with pytest.raises(
        ArtifactError, match=r"two seeds of 'pgra' with another corpus \(11111111, 2"
    ):
        check_comparable(group_of(*runs))


def test_another_prompt_takes_other_examples_out_of_train(tmp_path):
    """The examples that stand in the prompt are not trained on, so train differs with them."""
    a = plant(tmp_path / "a")
    other = fingerprints(train="d" * 64)
    shots = {"rerank": {"num_exemplars": 4}}
    check_comparable(group_of(a, plant(tmp_path / "b", arguments=shots, fingerprints=other)))


def test_a_grid_may_vary_the_data_it_says_it_varies(tmp_path):
    points = {"few": {"value": 8, "seeds": {0: []}}, "many": {"value": 80, "seeds": {0: []}}}
    root = plant_grid(tmp_path / "g", points, axis="data.max_train_samples")
    check_comparable(load_collection([root]).groups[0])
    loose = load_collection([root / "sst2"]).groups[0]
    with pytest.raises(ArtifactError, match="max_train_samples 8, 80"):
        check_comparable(loose)


def test_seeds_of_a_point_that_were_made_otherwise_are_refused(tmp_path):
    """Such as those of a grid that was stopped, and gone on with by another command."""
    points = {"k=8": {"value": 8, "seeds": {0: [], 1: [1]}}, "k=4": {"value": 4, "seeds": {0: []}}}
    root = plant_grid(tmp_path / "g", points)
    moved = {"retriever": {"num_candidates": 8}, "corpus": {"corpus": "moved/wiki.txt"}}
    plant(root / "sst2/k=8/seed-1", seed=1, wrong=[1], arguments=moved)
    check_comparable(load_collection([root]).groups[0])  # the control: points and places may differ
    other = {"retriever": {"num_candidates": 8}, "training": {"learning_rate": 1e-3}}
    plant(root / "sst2/k=8/seed-1", seed=1, wrong=[1], arguments=other)
    told = r"two seeds of 'k=8' with another setting \(learning_rate 0.0001, 0.001\); report them"
    with pytest.raises(ArtifactError, match=told):
        check_comparable(load_collection([root]).groups[0])


def test_one_run_twice_is_refused(tmp_path):
    a, b = plant(tmp_path / "a"), plant(tmp_path / "b", wrong=[3])
    with pytest.raises(ArtifactError, match="are the same method, setting, task and seed"):
        check_comparable(group_of(a, b))
    check_comparable(group_of(a, plant(tmp_path / "c", seed=1)))


def test_a_row_is_the_system_with_the_settings_in_which_its_runs_differ(tmp_path):
    group = group_of(
        plant(tmp_path / "a"),
        plant(tmp_path / "b", arguments={"retriever": {"num_candidates": 16}}),
        plant(tmp_path / "c", seed=1),
        plant(tmp_path / "d", method="fid", arguments={"rerank": {"num_evidence": 4}}),
    )
    assert row_names(group) == [
        *("pgra num_candidates=150", "pgra num_candidates=16", "pgra num_candidates=150"),
        "fid",
    ]


def test_two_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    corpora = ("old/wiki.txt", "new/wiki.txt", "books.txt")
    runs = [
        plant(tmp_path / f"{i}", arguments={"corpus": {"corpus": corpus}})
        for i, corpus in enumerate(corpora)
    ]
    told = ["pgra corpus=old/wiki.txt", "pgra corpus=new/wiki.txt", "pgra corpus=books.txt"]
    assert row_names(group_of(*runs)) == told
    check_comparable(group_of(*runs))
    assert row_names(group_of(*runs[1:])) == ["pgra corpus=wiki.txt", "pgra corpus=books.txt"]


def test_settings_that_differ_between_tasks_only_make_no_rows(tmp_path):
    """The paper's learning rates are a task's own (Table 7)."""
    other = {"training": {"learning_rate": 2e-5}}
    group = group_of(plant(tmp_path / "a"), plant(tmp_path / "b", task="sst5", arguments=other))
    assert row_names(group) == ["pgra", "pgra"]
    both = group_of(plant(tmp_path / "c"), plant(tmp_path / "d", arguments=other))
    assert row_names(both) == ["pgra learning_rate=0.0001", "pgra learning_rate=2e-05"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("shots.num_shots", (8, 16)),
        ("shots.exemplar_sets", (1, 4)),
        ("training.adam_beta2", (0.9, 1)),
    ],
)
def test_few_shot_runs_of_other_settings_are_no_seeds_of_one_row(tmp_path, name, values):
    section, _, name = name.partition(".")
    runs = [
        plant(tmp_path / f"{i}", method="lm-bff", seed=i, arguments={section: {name: value}})
        for i, value in enumerate(values)
    ]
    assert row_names(group_of(*runs)) == [f"lm-bff {name}={value}" for value in values]


def test_where_and_how_fast_a_run_was_makes_no_row(tmp_path):
    other = {"runtime": {"device": "cuda"}, "rerank": {"lm_batch_tokens": 9}}
    group = group_of(plant(tmp_path / "a"), plant(tmp_path / "b", seed=1, arguments=other))
    assert set(row_names(group)) == {"pgra"}


def test_what_a_system_does_not_look_at_makes_no_row(tmp_path):
    other = {"retriever": {"num_candidates": 16}}
    plain = [plant(tmp_path / "a", method="plain")]
    plain.append(plant(tmp_path / "b", method="plain", seed=1, arguments=other))
    assert row_names(group_of(*plain)) == ["plain", "plain"]
    fid = [
        plant(tmp_path / "c", method="fid"),
        plant(tmp_path / "d", method="fid", arguments=other),
    ]
    assert len(set(row_names(group_of(*fid)))) == 2


def test_tasks_stand_in_the_papers_order_then_by_name():
    assert in_order(["zeta", "cr", "alpha", "sst2", "cr"], TASK_ORDER) == [
        "sst2",
        "cr",
        "alpha",
        "zeta",
    ]
