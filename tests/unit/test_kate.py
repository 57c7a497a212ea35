"""KATE on tiny models: what a run leaves, reuses and refuses, with and without a memory.

The golden group `icl` has its commands, with every selector and way to answer.
"""

import shutil

import pytest
from conftest import review_rows, write_jsonl
from method_runs import having, kate_run, lines_of

from pgra.context import ALONE
from pgra.data.examples import DataArguments
from pgra.errors import ArtifactError
from pgra.methods.stages import Stages
from pgra.runs import Run, open_method, run

FIRST, NEAR = "A great film number 20.", "a GREAT film, number 2"  # FIRST: the first test text


@pytest.fixture(scope="module")
def world(tmp_path_factory, encoder_dir, lm_dirs):
    """A run whose vectors and answers all others find."""
    root = tmp_path_factory.mktemp("kate")
    train = write_jsonl(root / "train.jsonl", review_rows(40))
    test = write_jsonl(root / "test.jsonl", review_rows(12, start=20))
    data = DataArguments(task="sst2", train_file=str(train), test_file=str(test))
    return kate_run(data, root, lm=lm_dirs["gpt2"], encoder=str(encoder_dir), num_exemplars=3)


@pytest.fixture(scope="module")
def near(world):
    return run(world)


@pytest.fixture
def kate(world, tmp_path):
    return having(world, output_dir=str(tmp_path / "runs/run"))


@pytest.fixture
def words(kate):
    """By shared words, which needs no encoder."""
    return having(kate, encoder="bm25")


def test_answers_that_are_there_are_not_asked_again(world, kate, near, caplog):
    caplog.set_level("DEBUG", "pgra")
    again = run(kate)
    assert "the LM is asked 0 prompts," in caplog.text
    assert lines_of(again.folder) == lines_of(near.folder)
    run(having(kate, order="nearest-last", name="last"))
    assert "the LM is asked 12 prompts," in caplog.text
    with pytest.raises(ArtifactError, match="--num_exemplars 3"):
        run(having(world, num_exemplars=2))


def test_the_baseline_icl_reads_the_prompt_of_pgras_second_stage(args, kate):
    """Guo et al. 2023, section 3.1: "the same templates as ours in the second stage"."""
    stages = Stages.read(args, ALONE)
    ours = stages.prompt.prefix + stages.prompt.suffix(stages.data.test[0].fields)
    sections = {**kate.sections, "data": args.data}
    icl = having(type(kate)(sections), method="icl", exemplars="balanced", num_exemplars=4)
    same, other = (
        open_method(having(icl, exemplar_seed=seed), ALONE).sample_prompt() for seed in (0, 1)
    )
    assert same.strip() == ours.strip() != other.strip()


def test_the_vote_needs_no_lm_and_follows_the_nearest(kate):
    voted = run(having(kate, decide_by="vote", lm="no/such-lm", name="vote"))
    for line in lines_of(voted.folder):
        assert line["scores"][line["prediction"]] == max(line["scores"].values()) > 0.5


def test_a_run_decides_new_texts_as_its_own(near):
    lines = lines_of(near.folder)[:2]
    texts = [line["text"] for line in lines]
    alone = Run.load(near.folder, device="cpu").predict(texts)
    for line, answer in zip(lines, alone, strict=True):
        assert answer.label == line["prediction"]
        assert dict(answer.scores) == pytest.approx(line["scores"], abs=1e-5)
        for mine, theirs in zip(answer.details["exemplars"], line["exemplars"], strict=True):
            assert mine == {**theirs, "similarity": pytest.approx(theirs["similarity"], abs=1e-5)}


def test_a_run_whose_pool_has_changed_decides_nothing(words, tmp_path):
    pool = shutil.copy(words.data.train_file, tmp_path / "pool.jsonl")
    outcome = run(having(words, train_file=str(pool)))
    shutil.copy(words.data.test_file, pool)
    with pytest.raises(ArtifactError, match="similarity"):
        Run.load(outcome.folder, device="cpu").predict("a film")
