"""KATE on tiny models: what a run leaves, reuses and refuses, with and without a memory.

The golden group `icl` has its commands, with every selector and way to answer.
"""

import shutil

import pytest
from conftest import review_rows, write_jsonl
from loopback import LoopbackEndpoint, Written
from method_runs import having, kate_run, lines_of

from pgra.context import ALONE
from pgra.data.examples import DataArguments
from pgra.errors import ArtifactError
from pgra.methods.stages import Stages
from pgra.run_folder import read_object
from pgra.runs import Run, evaluate_run, open_method, run

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
    assert "the LM is asked 0 prompts of 12," in caplog.text
    assert lines_of(again.folder) == lines_of(near.folder)
    run(having(kate, order="nearest-last", name="last"))
    assert "the LM is asked 12 prompts of 12," in caplog.text
    with pytest.raises(ArtifactError, match=r"was made with --num_exemplars 3 \(now 2\)"):
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


def test_a_run_decides_new_texts_as_its_own(near, tmp_path):
    lines = lines_of(near.folder)[:2]
    texts = [line["text"] for line in lines]
    alone = Run.load(near.folder, device="cpu").predict(texts)
    for line, answer in zip(lines, alone, strict=True):
        assert answer.label == line["prediction"]
        assert dict(answer.scores) == pytest.approx(line["scores"], abs=1e-5)
        for mine, theirs in zip(answer.details["exemplars"], line["exemplars"], strict=True):
            assert mine == {**theirs, "similarity": pytest.approx(theirs["similarity"], abs=1e-5)}
    few = write_jsonl(tmp_path / "few.jsonl", review_rows(4, start=20))  # measured on another file
    changes = {"test_file": str(few)}
    again = evaluate_run(near.folder, changes=changes, output_dir=tmp_path / "elsewhere")
    assert again.metrics["n"] == 4
    theirs = [line["prediction"] for line in lines_of(near.folder)[:4]]
    assert [line["prediction"] for line in lines_of(again.folder)] == theirs


def test_a_run_whose_pool_has_changed_decides_nothing(words, tmp_path):
    pool = shutil.copy(words.data.train_file, tmp_path / "pool.jsonl")
    outcome = run(having(words, train_file=str(pool)))
    shutil.copy(words.data.test_file, pool)
    with pytest.raises(ArtifactError, match=r"restore them, or run it again"):
        Run.load(outcome.folder, device="cpu").predict("a film")


@pytest.mark.slow
def test_a_run_behind_an_endpoint_says_how_it_was_asked_and_what_that_cost(
    words, tmp_path, monkeypatch, caplog
):
    """A chat writes labels; what was answered costs nothing in another run."""
    caplog.set_level("INFO")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def write(prompt, max_tokens, stop):
        query = prompt.rpartition("\n\n")[2]
        text = "Positive" if "great" in query else "negative"
        return Written("well" if "number 31" in query else text, 30, 1)

    server = LoopbackEndpoint(write)
    server.endpoints = ["chat"]
    asked = having(words, lm="openai:toy", lm_window=2000)
    with server.serve() as url:
        asked = having(asked, base_url=url)
        first = run(asked)
        num_bodies = len(server.bodies)
        assert run(asked).metrics == first.metrics  # finished, and so taken up
        again = run(having(asked, name="again"))
        assert len(server.bodies) == num_bodies
        lines = lines_of(first.folder)
        assert lines_of(again.folder) == lines
        with pytest.raises(ArtifactError, match=r"made with --max_new_tokens None \(now 3\)"):
            run(having(asked, max_new_tokens=3))
    paid = {"calls": 12, "prompt_tokens": 30 * 12, "completion_tokens": 12}
    way = {"endpoint": "chat", "decide_by": "generation", "unanswered": 0}
    assert first.metrics["endpoint"] == way | paid
    assert again.metrics["endpoint"] == way | dict.fromkeys(paid, 0)
    for line in lines:
        if "number 31" in line["text"]:  # no label's word
            assert (line["prediction"], {*line["scores"].values()}) == ("(no label)", {0.0})
        else:
            assert line["prediction"] == ("positive" if "great" in line["text"] else "negative")
    arguments = read_object(first.folder / "arguments.json")
    assert arguments["icl"]["decide_by"] == "generation"
    assert arguments["completer"]["endpoint"] == "chat"
    assert caplog.text.count("is asked by chat, labels by generation") == 1
