"""What a first stage will bring, before it is run, against what it brings."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import SENTENCES
from small_index import World

from pgra.core import MISSING_ROW, Example
from pgra.errors import ArtifactError
from pgra.retrieval import open_retriever
from pgra.retrieval.base import candidates_fields, store_candidates
from pgra.retrieval.survey import Survey, expect_distinct, trial_size

KINDS = ["bm25", "dense", "hybrid"]
SPLITS = {
    "train": [Example(f"train-{i}", {"text": text}) for i, text in enumerate(SENTENCES[:3])],
    "test": [Example("test-0", {"text": "The blue sea by the old town."})],
}


@pytest.fixture
def survey(tmp_path, encoder_dir):
    request = World(tmp_path, encoder_dir).request(num_candidates=3)
    return Survey(request=request, task="sst2", splits=SPLITS)


def having(survey, **changes):
    """Change arguments of the first stage."""
    request = survey.request
    return replace(survey, request=replace(request, args=replace(request.args, **changes)))


def run_first_stage(survey, *, store=False):
    """Do as the pipeline does; give the distinct passages."""
    args, context = survey.request.args, survey.request.context
    retriever = open_retriever(args, survey.request.corpus, context)
    found = []
    for split, examples in survey.splits.items():
        fields = candidates_fields(
            retriever.fingerprint, args.retriever, args.num_candidates, examples=examples
        )
        queries = [example.text for example in examples]
        found.append(retriever.retrieve(queries, args.num_candidates))
        if store:
            root = context.artifacts / "candidates" / survey.task
            store_candidates(root, split, fields, lambda f=found[-1]: f, stage="candidates")
    rows = np.unique(np.concatenate([candidates.rows.ravel() for candidates in found]))
    return rows[rows != MISSING_ROW]


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_corpus_is_tried_an_index_searched_and_stored_candidates_counted(survey, kind):
    survey = having(survey, retriever=kind)
    tried = survey.run()
    assert tried.num_to_encode == (0 if kind == "bm25" else len(SENTENCES))
    assert (tried.index_bytes, tried.seconds > 0) == (0, True)
    assert [p.name for p in survey.request.context.artifacts.iterdir()] == ["corpora"]
    rows = run_first_stage(survey)
    searched = survey.run()
    assert searched.num_to_encode == 0 < searched.index_bytes
    stored = replace(survey, seconds=0).run()  # nothing is stored yet
    assert stored.basis == "guessed"
    run_first_stage(survey, store=True)
    stored = replace(survey, seconds=0).run()
    assert [found.basis for found in (tried, searched, stored)] == ["searched"] * 2 + ["stored"]
    for found in (tried, searched, stored):
        np.testing.assert_array_equal(found.rows, rows)
        assert found.num_texts == len(rows) < len(SENTENCES)
    assert stored.seconds == 0


def test_an_index_that_is_gone_is_built_again_whatever_is_stored(survey):
    survey = having(survey, retriever="hybrid")
    run_first_stage(survey, store=True)
    for folder in (survey.request.context.artifacts / "indexes").iterdir():
        if folder.name.startswith("bm25"):
            shutil.rmtree(folder)
    without_words = survey.run()
    assert (without_words.basis, without_words.num_to_encode) == ("stored", 0)
    assert without_words.seconds is None
    shutil.rmtree(survey.request.context.artifacts / "indexes")
    assert survey.run().num_to_encode == len(SENTENCES)


def test_without_time_nothing_is_searched_and_an_approximate_index_is_only_tried(survey):
    found = replace(survey, seconds=0).run()
    # 4 queries, each with 3 of 12: a passage is left out with (3/4)^4.
    assert found.num_texts == round(12 * (1 - 0.75**4)) == 8
    assert (found.basis, len(found.rows), found.seconds) == ("guessed", 12, None)
    tried = having(survey, index_factory="HNSW4").run()
    assert tried.basis == "trial"
    assert 0 < tried.num_texts <= 12


def test_given_little_time_a_part_of_the_queries_stands_for_all(survey):
    many = {"train": [Example(str(i), {"text": SENTENCES[i % 12]}) for i in range(200)]}
    survey = replace(survey, splits=many)
    run_first_stage(survey)
    hurried = replace(survey, seconds=1e-9).run()
    assert hurried.basis == "sampled"
    assert not hurried.is_exact
    assert 0 < len(hurried.rows) <= hurried.num_texts <= 12
    assert survey.run().basis == "searched"


def test_a_given_index_of_something_else_is_refused(survey, tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(ArtifactError, match="has no manifest.json"):
        having(survey, index_dir=str(tmp_path / "other")).run()
    run_first_stage(survey)
    (index,) = (survey.request.context.artifacts / "indexes").iterdir()
    given = having(survey, index_dir=str(index))
    elsewhere = replace(given.request.context, artifacts=tmp_path / "elsewhere")
    moved = replace(given, request=replace(given.request, context=elsewhere)).run()
    assert (moved.basis, moved.num_to_encode) == ("searched", 0)


def test_a_trial_shrinks_passages_and_candidates_alike():
    assert trial_size(1000, 20, 5000) == (1000, 20)
    assert trial_size(1000, 20, 500) == (500, 10)
    assert trial_size(1000, 20, 130) == (100, 2)
    assert trial_size(1_000_000, 150, 16384) == (13333, 2)
    assert trial_size(1_000_000, 20, 16384) == (0, 0)  # one candidate needs 50,000


def test_what_is_expected_of_all_queries_by_hand():
    same = np.array([[1, 2, 3]] * 8)
    assert expect_distinct(same, 800, most=1000) == 3  # nothing new came
    # 4 queries without a repeat: power growth gives 8 x 4 x 10; Chao's bound, with no passage seen
    # twice, 3/4 x 8 x 7 / 2 = 21 unseen, of which 36 more queries find 1 - (1 - 8/92)^36.
    apart = np.arange(8).reshape(4, 2)
    found = 8 + 21 * (1 - (1 - 8 / 92) ** 36)
    assert expect_distinct(apart, 40, most=1000) == round((80 * found) ** 0.5)
    assert expect_distinct(apart, 40, most=12) == 12
    assert expect_distinct(apart, 4, most=1000) == 8
    assert expect_distinct(np.full((4, 2), MISSING_ROW), 40, most=1000) == 0


@pytest.mark.parametrize("num_topics", [40, 400])
def test_what_is_expected_is_about_what_comes(num_topics):
    rng = np.random.default_rng(0)
    topics = rng.zipf(1.5, (1000, 1)) % num_topics  # some are asked for often
    rows = np.sort(topics * 30 + rng.integers(0, 30, (1000, 10)), axis=1)
    repeats = np.zeros_like(rows, dtype=bool)
    repeats[:, 1:] = rows[:, 1:] == rows[:, :-1]
    rows = np.where(repeats, MISSING_ROW, rows)
    truth = len(np.unique(rows[rows != MISSING_ROW]))
    expected = expect_distinct(rows[:100], 1000, most=num_topics * 30)
    assert expected == pytest.approx(truth, rel=0.25)
