"""What evidence is worth: copied answers, controls, hidden labels, runs that take the best."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import BAD, GOOD, THINGS, review_rows, with_retriever, write_jsonl
from loopback import LoopbackEndpoint, Written, toy_writer
from method_runs import run_of

import pgra
from pgra.cli import main
from pgra.errors import ArtifactError, ModelError, PgraError
from pgra.experiments.worth import (
    WorthStudy,
    calibrate,
    measure_worth,
    take_evidence,
)
from pgra.methods.arguments import WorthArguments
from pgra.methods.pgra import Pgra
from pgra.methods.ralm import Ralm
from pgra.prompts import SEPARATOR
from pgra.rerank.base import query_key
from pgra.runs import run

TARGETS = np.arange(60) % 2


def test_calibration_sees_no_label_of_a_query_or_a_later_one():
    scores = np.random.default_rng(3).normal(size=(60, 2)).astype(np.float32)
    scores[np.arange(60), TARGETS] += 2
    ours = calibrate(scores, TARGETS, 40)
    assert ours[np.arange(20), TARGETS[40:]].mean() > np.log(0.6)
    np.testing.assert_allclose(calibrate(3 * scores + [5, -2], TARGETS, 40), ours, atol=1e-4)
    np.testing.assert_allclose(calibrate(0 * scores, TARGETS, 40), np.log(0.5), atol=1e-6)
    for start, is_same in ((40, True), (39, False)):
        flipped = np.where(np.arange(60) >= start, 1 - TARGETS, TARGETS)
        assert (calibrate(scores, flipped, 40) == ours).all() == is_same


QUESTIONS = [{"question": f"What is {n}?", "answers": [f"word{n}"]} for n in range(60)]
RIGHT = [[f"It is word{n}", "Nothing"] for n in range(60)]


@pytest.fixture
def echo(monkeypatch):
    """Have an LM that writes the last word of what stands before the question."""
    monkeypatch.setattr(
        Ralm, "write", lambda self, prompts: [p.split("\n\nQ:")[0].split()[-1] for p in prompts]
    )


def test_a_reader_that_copies_evidence_is_helped_by_the_right_one(echo, lm_dirs):
    arms = {"right": RIGHT, "half": [RIGHT[n // 2 * 2] for n in range(60)], "none": [["No"]] * 60}
    found = pgra.worth(str(lm_dirs["gpt2"]), QUESTIONS, arms, depths=[1])
    rows = {row["source"]: row for row in found["rows"]}
    assert found["best"] == rows["right"]
    means = [rows["right"][name]["mean"] for name in ("gain", "gained")]
    assert (means, rows["right"]["destroyed"], rows["right"]["known"]) == ([100, 1], {}, 0)
    assert rows["right"]["gain"]["low"] > 50
    assert rows["half"]["gain"]["mean"] < 80
    assert found["why"].startswith("right, d = 1: +100 points (")
    assert rows["none"]["queries"] == rows["half"]["queries"] == found["queries"] == 20
    assert found["calls"] == 80
    alone = pgra.worth(
        str(lm_dirs["gpt2"]), QUESTIONS, {"none": arms["none"]}, depths=[1], budget=90
    )
    assert (alone["best"], alone["calls"]) == (None, 80)
    assert alone["why"].startswith("not decided after 40 queries: between without and none, d = 1")


def test_what_cannot_be_compared_is_refused(echo, lm_dirs):
    def refuse(words, questions=QUESTIONS, passages=60, depths=(1,), **options):
        arms = {"a": [["b"]] * passages}
        with pytest.raises(PgraError, match=words):
            pgra.worth(str(lm_dirs["gpt2"]), questions, arms, depths=depths, **options)

    refuse("20 examples or more, not 19", QUESTIONS[:19], 19)
    refuse("59 lists", passages=59)
    refuse("1 passages a query", depths=[1, 2])
    refuse("measure", measure="bleu")
    refuse("text of a list", [{"question": "Who?", "answers": "['a', b]"}] * 60)


SED = r"""command:sed 's/.* \(.*\)?/["It is word\1"]/'"""


def test_a_command_finds_passages_for_questions_of_any_columns(
    echo, lm_dirs, tmp_path, monkeypatch
):
    lines = ["q,a", *(f"{r['question']},{r['answers'][0]}" for r in QUESTIONS)]
    (tmp_path / "q.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    reader = f"--reader_lm {lm_dirs['gpt2']} --depths 1 --json worth.json"
    words = f"worth --questions q.csv --columns question=q answers=a {reader} --sources".split()
    assert main([*words, SED]) == 0
    assert main(["report", "worth.json", "--output", "page.html"]) == 0
    for text in ("100% (", "go on with its first 1 passages"):
        assert text in Path("page.html").read_text()
    for command in ("command:false", "command:echo text", "command:echo []"):
        assert main([*words, command]) == 2


def read_evidence(prompt, *_):
    return Written(f" {prompt.split(SEPARATOR)[-2:][0].split()[-1]}", 1, 1)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    server = LoopbackEndpoint(read_evidence)
    with server.serve() as url:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        yield server


@pytest.mark.slow
def test_an_endpoint_that_dies_is_asked_nothing_twice(server):
    ask = partial(pgra.worth, "openai:toy", QUESTIONS, {"right": RIGHT}, depths=[1])
    server.dies_after = 30
    with pytest.raises(ModelError, match="answers.sqlite"):
        ask()
    server.dies_after = None
    found = ask()
    assert found["best"]["gain"]["mean"] == 100
    prompts = [str(body) for body in server.bodies]
    assert {*prompts[:30]}.isdisjoint(prompts[30:])


def test_labels_are_written_where_an_endpoint_scores_no_words(server):
    rows = review_rows(60)
    arms = {"right": [[f"It is {row['label']}"] for row in rows]}
    ways = (["chat"], read_evidence, "accuracy"), (["completions"], toy_writer, "bits")
    for server.endpoints, server.writer, measure in ways:
        found = pgra.worth("openai:toy", rows, arms, depths=[1], task="sst2")
        assert (found["measure"], bool(found["best"])) == (measure, measure == "accuracy")


@pytest.fixture
def args(args, tmp_path):
    """88 reviews, and passages that have their words, one of them a review itself."""
    passages = [f"A {word} {thing} number" for word in GOOD + BAD for thing in THINGS[:4]]
    rows = review_rows(88)
    (tmp_path / "corpus.txt").write_text("\n".join([*passages, rows[0]["text"]]) + "\n")
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", review_rows(12, start=88))
    return run_of(with_retriever(args, retriever="bm25"), "pgra", tmp_path / "run")


@pytest.fixture
def words_read(monkeypatch):
    """Have a reader that counts the good and bad words of the evidence."""

    def score(self, lines):
        texts = [" ".join(line.text for line in own).lower() for own in lines]
        counts = [[sum(text.count(w) for w in words) for words in (GOOD, BAD)] for text in texts]
        order = [["positive", "negative"].index(label) for label in self.data.labels]
        return np.array(counts, np.float32)[:, order]

    monkeypatch.setattr(Pgra, "new_inputs", lambda self, examples, lines: lines)
    monkeypatch.setattr(Pgra, "score", score)


@pytest.mark.slow
def test_evidence_with_the_answer_is_worth_a_bit(args, words_read, tmp_path):
    found = measure_worth(args, WorthArguments(depths=[1, 8]))
    rows = {(row["source"], row["d"]): row for row in found["rows"]}
    assert {d for _, d in rows} == {1, 6}  # no more than candidates
    assert rows["first_stage", 1]["gain"]["low"] > 0.2
    assert rows["first_stage", 1]["accuracy"] > 0.9 > 0.7 > found["without"]["accuracy"]
    assert rows["random", 1]["gain"]["low"] < 0.05
    assert rows["random", 1]["gain"]["mean"] < 0.2
    assert found["without"]["bits"] == pytest.approx(-1, abs=0.1)  # two labels, half each
    assert found["why"].startswith("first_stage, d = ")
    assert found["changes"]["reranker"] == "none"
    labels = np.random.default_rng(0).permutation([row["label"] for row in review_rows(88)])
    rows = [{**row, "label": label} for row, label in zip(review_rows(88), labels, strict=True)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    how = WorthArguments(depths=[1], sources=["first_stage", "head"])
    found = measure_worth(args, how)
    assert (found["best"], found["changes"]) == (None, {"num_evidence": 0})
    assert all(row["gain"]["low"] < 0 for row in found["rows"])


@pytest.mark.slow
def test_a_t5_is_asked_nothing_twice(args, words_read, monkeypatch):
    read, score = [], Pgra.score
    monkeypatch.setattr(Pgra, "score", lambda self, lines: read.extend(lines) or score(self, lines))

    def ask(args=args, **sources):
        read.clear()
        found = measure_worth(args, WorthArguments(depths=[1], **sources))
        return len(read), {name: found[name] for name in ("rows", "why", "calls")}

    calls, first = ask(sources=["first_stage"])
    assert calls == first["calls"] > 0
    assert ask(sources=["first_stage"]) == (0, first)
    # The control: with other words it is another reader.
    other = args.change("reader", reader_template="{text} So")
    assert ask(other, sources=["first_stage"])[0] == calls


@pytest.mark.slow
def test_a_head_is_fitted_to_none_of_its_queries(args, tmp_path, monkeypatch):
    study = WorthStudy(args, WorthArguments(depths=[6]))
    fitted, open_stages = [], WorthStudy._stages
    monkeypatch.setattr(
        WorthStudy,
        "_stages",
        lambda self, a, train: fitted.append(train) or open_stages(self, a, train),
    )
    for name, count in (("head", 5), ("whitened_cosine", 1)):
        fitted.clear()
        lines = study.find_evidence(name)
        assert len(fitted) == count
        assert all(q.text not in texts for q, texts in zip(study.queries, lines, strict=True))
    stages = study.method.stages
    query = next(query for query in study.queries if query.text == review_rows(2)[0]["text"])
    for stages.finds_itself in (False, True):
        (lines,) = stages.new_lines([query])
        assert stages.finds_itself == (query.text in {line.text for line in lines})
    fitted.clear()
    study.find_evidence("head")
    keys = {query_key(query) for query in study.queries}
    hidden = [keys - {query_key(one) for one in train} for train in fitted]
    assert [len(h) for h in hidden] == np.bincount(study.folds).tolist()
    assert set.union(*hidden) == keys


@pytest.mark.slow
def test_a_run_takes_what_is_best_once_and_says_why(args, words_read, tmp_path, monkeypatch):
    args = args.change("training", evidence="auto")
    assert with_retriever(args, num_candidates=2)  # fewer than num_evidence, which is chosen
    worth = measure_worth(args, WorthArguments())
    monkeypatch.undo()
    monkeypatch.setattr("pgra.runs.measure_worth", lambda *_: worth)
    made = run(args)
    assert worth["best"]
    assert worth["changes"].items() <= vars(made.args.rerank).items()
    assert worth["why"] in made.metrics["notes"]
    before = made.predictions
    (tmp_path / "run/metrics.json").unlink()
    assert run(args).predictions == before
    assert run(args).reused
    given = args.change("training", evidence="given")
    assert run(take_evidence(given, worth["changes"])).reused  # the same by its flags
    with pytest.raises(ArtifactError, match="run"):
        run(given)
