"""A trained run, used on new texts: `pgra predict`, and what a run says of its probabilities."""

import json
import shutil

import numpy as np
import pytest
from conftest import write_jsonl
from scripted import Bench, call, read_json, review_rows

import pgra
from pgra.cli import main as pgra_main
from pgra.commands.predict import main as predict_main
from pgra.memory.log import FeedbackLog

TEXTS = ["A warm film by the sea.", "A dull story."]


@pytest.fixture(scope="module")
def bench(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    made = Bench(tmp_path_factory.mktemp("predict"), lm_dirs["gpt2"], encoder_dir, t5_dir)
    made.flags["validation_file"] = write_jsonl(made.root / "dev.jsonl", review_rows(60, start=40))
    made.flags["eval_strategy"] = "no"
    made.flags["load_best_model_at_end"] = "false"
    made.flags["save_strategy"] = "no"
    return made


def trained(bench, name, **changes):
    called = bench.train(name, **changes)
    assert called.code == 0, called.err
    return bench.run(name)


@pytest.fixture(scope="module")
def run(bench):
    return trained(bench, "pgra", evidence_attention=True)


def ask(run, *words):
    return call(predict_main, [*map(str, words), "--run", str(run), "--device", "cpu"])


def answers(run, *words):
    called = ask(run, *words, "--json")
    assert called.code == 0, called.err
    return [json.loads(line) for line in called.out.splitlines()]


def test_the_readers_folder_says_what_it_was_made_with(bench, run):
    record = read_json(run / "reader" / "pgra.json")
    assert (record["task"], record["labels"]) == ("sst2", ["negative", "positive"])
    assert (record["method"], record["num_evidence"], record["seed"]) == ("pgra", 2, 1)
    assert len(record["prompt"]["exemplar_ids"]) == 2
    assert record["prompt"]["prefix"] in (run / "prompt.txt").read_text()
    arguments = read_json(run / "arguments.json")
    assert record["arguments"] == {k: v for k, v in arguments.items() if k != "training"}
    fingerprints = read_json(run / "metrics.json")["fingerprints"]
    weights = record["files"]["model.safetensors"]["checksum"]
    assert {**record["fingerprints"], "reader": weights} == fingerprints
    assert {"corpus", "index", "reranker", "evidence/test", "run"} <= set(fingerprints)
    assert "token" not in " ".join(record["arguments"]["runtime"])


def test_probabilities_are_calibrated_on_dev_and_decisions_are_not_touched(bench, run):
    told = read_json(run / "metrics.json")["calibration"]
    record = read_json(run / "reader" / "pgra.json")
    temperature = record["calibration"]["temperature"]
    assert told["temperature"] == temperature != 1.0
    assert (told["dev_examples"], told["bins"]) == (60, 15)
    lines = bench.predictions("pgra")
    cold = []
    for line in lines:  # undo the temperature: probabilities to the power T
        scores = np.array(list(line["scores"].values())) ** temperature
        cold.append(dict(zip(line["scores"], scores / scores.sum(), strict=True)))
        assert max(cold[-1], key=cold[-1].get) == line["prediction"]
    for which, scores in (("after", [line["scores"] for line in lines]), ("before", cold)):
        by_hand = -np.mean([np.log(s[x["label"]]) for s, x in zip(scores, lines, strict=True)])
        assert told["nll"][which] == pytest.approx(by_hand, rel=1e-5)
    assert told["nll"]["before"] != told["nll"]["after"]


def test_evidence_has_its_share_of_attention_where_that_was_asked_for(bench, run, tmp_path):
    for line in bench.predictions("pgra"):
        shares = [item["attention"] for item in line["evidence"]]
        assert len(shares) == 2
        assert sum(shares) == pytest.approx(1, abs=1e-5)
    again = bench.evaluate("pgra", "--output_dir", tmp_path / "again")
    assert again.code == 0, again.err
    before, after = bench.predictions("pgra"), (tmp_path / "again" / "predictions.jsonl")
    assert [json.loads(line) for line in after.read_text().splitlines()] == before


def test_new_texts_get_what_the_test_set_got(bench, run):
    """The same sentences by another way: evaluate's batches and stored evidence, or one by one."""
    rows = bench.predictions("pgra")[:3]
    found = answers(run, *[row["text"] for row in rows], "--attention")
    for row, answer in zip(rows, found, strict=True):
        assert answer["text"] == row["text"]
        assert answer["prediction"] == row["prediction"]
        for name, chance in row["scores"].items():
            assert answer["scores"][name] == pytest.approx(chance, abs=1e-5)
        for ours, theirs in zip(answer["evidence"], row["evidence"], strict=True):
            assert (ours["row"], ours["text"]) == (theirs["row"], theirs["text"])
            assert ours["stage1_rank"] == theirs["stage1_rank"]
            assert ours["score"] == pytest.approx(theirs["score"], rel=1e-4)
            assert ours["attention"] == pytest.approx(theirs["attention"], abs=1e-4)


def test_new_texts_are_scored_by_the_similarity_that_the_run_fitted(bench):
    changes = {"similarity": "whitened_cosine", "max_steps": 1, "max_dev_samples": 8}
    fitted = trained(bench, "fitted", **changes)
    row = bench.predictions("fitted")[3]
    (answer,) = answers(fitted, row["text"])  # alone, and without the training data
    assert answer["prediction"] == row["prediction"]
    for ours, theirs in zip(answer["evidence"], row["evidence"], strict=True):
        assert (ours["row"], ours["score"]) == (theirs["row"], pytest.approx(theirs["score"]))
    shutil.rmtree(bench.artifacts / "similarities")
    shutil.rmtree(bench.artifacts / "indexes")
    refused = ask(fitted, row["text"])
    assert not (bench.artifacts / "indexes").exists()  # refused before anything long
    assert "is missing, what similarity 'whitened_cosine' was fitted to: " in refused.error
    again = bench.train("fitted", **changes)  # as the message says
    assert again.code == 0, again.err
    assert answers(fitted, row["text"]) == [answer]


def test_a_person_sees_label_probabilities_and_evidence(run):
    called = ask(run, *TEXTS, "--num_shown", 1, "--attention")
    assert called.code == 0, called.err
    first, second = called.out.strip().split("\n\n")
    query, label, head, columns, line = first.splitlines()
    (answer, _) = answers(run, *TEXTS, "--attention")
    assert query == f"query: {TEXTS[0]}"
    assert label.startswith(
        f"label: {answer['prediction']}  (probabilities: {answer['prediction']}"
    )
    assert head == "evidence, 1 of 2, best first:"
    assert columns.split() == [
        "stage-1",
        "rank",
        "score",
        "stage-2",
        "score",
        "attention",
        "passage",
    ]
    best = answer["evidence"][0]
    assert line.split()[0] == str(best["stage1_rank"])
    assert line.endswith(f"{best['attention']:.3f}  {best['text']}")
    assert second.startswith(f"query: {TEXTS[1]}")


def test_files_of_lines_and_of_objects_give_the_same(run, tmp_path):
    lines, objects = tmp_path / "new.txt", tmp_path / "new.jsonl"
    lines.write_text(f"{TEXTS[0]}\n\n{TEXTS[1]}\n")
    write_jsonl(objects, [{"text": text, "id": 7} for text in TEXTS])
    expected = answers(run, *TEXTS)
    assert answers(run, "--file", lines) == answers(run, "--file", objects) == expected


def test_a_task_of_two_inputs_takes_one_text_or_both_fields(bench, t5_dir, tmp_path):
    task = tmp_path / "pairs.yaml"
    task.write_text(
        "inputs: [claim, source]\nlabels: ['no', 'yes']\nprompt: '{claim} {source}'\n"
        "reader_template: '{source} {claim} <extra_id_0>'\n"
        "verbalizer: {'no': terrible, 'yes': great}\n"
    )
    rows = [
        {"claim": row["text"], "source": "the sea", "label": "yes" if i % 2 else "no"}
        for i, row in enumerate(review_rows(60))
    ]
    names = ("train_file", "validation_file", "test_file")
    files = {name: write_jsonl(tmp_path / f"{name}.jsonl", rows) for name in names}
    run = trained(bench, "pairs", task=task, num_evidence=0, **files)
    pair = {"claim": TEXTS[0], "source": "a town on a hill"}
    both, first = write_jsonl(tmp_path / "q.jsonl", [pair]), tmp_path / "q.txt"
    first.write_text(TEXTS[0])
    (answer,) = answers(run, "--file", both)
    assert (answer["text"], answer["fields"]) == (f"{TEXTS[0]} a town on a hill", pair)
    (alone,) = answers(run, TEXTS[0])
    assert alone["fields"] == {"claim": TEXTS[0], "source": ""}
    assert alone == answers(run, "--file", first)[0]
    assert alone["scores"] != answer["scores"]
    write_jsonl(both, [{"claim": "a"}])
    assert "'source' is None, not text: the task's inputs are claim, source" in (
        ask(run, "--file", both).error
    )


def test_no_training_data_is_read(bench, run, tmp_path):
    hidden = bench.train_file.rename(tmp_path / "hidden.jsonl")
    try:
        assert len(answers(run, *TEXTS)) == 2
        assert len(pgra.Reader.load(run, device="cpu").predict(TEXTS, [])) == 2
    finally:
        hidden.rename(bench.train_file)


def test_a_moved_reader_answers_as_the_run(run, tmp_path):
    moved = shutil.copytree(run / "reader", tmp_path / "moved")
    assert answers(moved, *TEXTS) == answers(run, *TEXTS)


@pytest.fixture(scope="module")
def plain(bench):
    """A plain T5: it needs neither corpus nor bank."""
    return trained(bench, "t5", num_evidence=0, max_dev_samples=20, evidence_attention=True)


def test_a_plain_t5_searches_nothing(bench, plain, tmp_path):
    elsewhere = ("--artifacts_dir", tmp_path / "none")
    assert [answer["evidence"] for answer in answers(plain, *TEXTS, *elsewhere)] == [[], []]
    assert not (tmp_path / "none").exists()
    assert ask(plain, TEXTS[0], "--attention").out.count("\n") == 2
    assert bench.predictions("t5")[0]["evidence"] == []


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("whole", {"retriever": "exhaustive"}),
        pytest.param("fid", {"reranker": "none"}, marks=pytest.mark.slow),
        pytest.param("hybrid", {"retriever": "hybrid"}, marks=pytest.mark.slow),
    ],
)
def test_every_method_answers_with_its_own_stages(bench, name, flags):
    run = trained(bench, name, max_dev_samples=8, **flags)
    row = bench.predictions(name)[0]
    (found,) = answers(run, row["text"])
    for ours, theirs in zip(found["evidence"], row["evidence"], strict=True):
        assert (ours["row"], ours["stage1_rank"]) == (theirs["row"], theirs["stage1_rank"])
        assert ours["score"] == pytest.approx(theirs["score"], rel=1e-4)


def test_without_probabilities_nothing_is_calibrated(bench, plain, tmp_path):
    called = bench.evaluate("t5", "--decode", "official", "--output_dir", tmp_path)
    assert called.code == 0, called.err
    metrics = read_json(tmp_path / "metrics.json")
    assert metrics["calibration"] is None
    assert not any("calibrated" in note for note in metrics["notes"])


def test_too_few_dev_examples_are_told(plain):
    metrics = read_json(plain / "metrics.json")
    assert metrics["calibration"]["temperature"] == 1.0
    assert metrics["calibration"]["nll"]["before"] == metrics["calibration"]["nll"]["after"]
    assert any("20 dev examples are too few to fit it" in note for note in metrics["notes"])


@pytest.fixture
def other(bench, run, tmp_path):
    """A copy of the reader whose arguments can be changed."""

    def change(**sections):
        folder = shutil.copytree(run / "reader", tmp_path / "other", dirs_exist_ok=True)
        record = read_json(run / "reader" / "pgra.json")
        for section, values in sections.items():
            record["arguments"][section].update(values)
        (folder / "pgra.json").write_text(json.dumps(record))
        return folder

    return change


def test_another_corpus_encoder_or_lm_is_refused_by_name(bench, other, lm_dirs, encoder_dirs):
    corpus = bench.root / "another.txt"
    corpus.write_text(bench.corpus.read_text() + "One more.\n")
    refused = ask(other(corpus={"corpus": str(corpus)}), *TEXTS)
    assert "was made with corpus " in refused.error
    assert refused.error.endswith("restore it, or train again")
    indexes = sorted(bench.artifacts.glob("indexes/*"))
    refused = ask(other(retriever={"encoder": str(encoder_dirs["roberta"])}), *TEXTS)
    assert "was made with encoder " in refused.error
    assert sorted(bench.artifacts.glob("indexes/*")) == indexes  # none was built for it
    refused = ask(other(rerank={"lm": str(lm_dirs["opt"])}), *TEXTS)
    assert "was made with reranker " in refused.error
    refused = ask(other(retriever={"pooling": "cls"}), *TEXTS)
    assert "was made with index pooling " in refused.error
    refused = ask(other(rerank={"similarity": "cosine"}), *TEXTS)
    assert 'with reranker similarity "dot", what is there now is "cosine"' in refused.error


def test_arguments_of_another_version_are_refused(other):
    refused = ask(other(rerank={"novelty": 3}), *TEXTS)
    assert "holds arguments that this version of pgra does not know" in refused.error
    assert "novelty" in refused.error


def test_missing_artifacts_are_named_and_not_built_elsewhere(run, tmp_path):
    refused = ask(run, *TEXTS, "--artifacts_dir", tmp_path / "gone")
    assert "gone does not exist, where the run's index and bank are looked for" in refused.error
    assert not (tmp_path / "gone").exists()


def test_what_to_decide_must_be_said_once(run, tmp_path):
    assert "give either texts" in ask(run).error
    assert "not both" in ask(run, "a text", "--file", tmp_path / "x.txt").error
    assert "--run is missing" in call(predict_main, ["a text"]).error
    assert "num_shown is -1" in ask(run, "a text", "--num_shown", "-1").error
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert "empty.txt holds no text" in ask(run, "--file", empty).error
    lacking = write_jsonl(tmp_path / "lacking.jsonl", [{"text": "a"}, {"title": "b"}])
    assert "line 2: 'text' is None, not text: the task's inputs are text" in (
        ask(run, "--file", lacking).error
    )


def test_a_run_that_was_killed_before_its_end_goes_on_and_then_answers(bench, plain):
    answer = answers(plain, TEXTS[0])
    (plain / "reader" / "pgra.json").unlink()
    assert "the same train.py command goes on with it" in ask(plain, TEXTS[0]).error
    assert "the same train.py command goes on with it" in bench.evaluate("t5").error
    trained(bench, "t5", num_evidence=0, max_dev_samples=20)
    assert answers(plain, TEXTS[0]) == answer


def test_a_finished_run_says_how_to_add_attention(bench, run):
    trained(bench, "without", max_dev_samples=8)
    assert "attention" not in bench.predictions("without")[0]["evidence"][0]
    called = bench.train("without", max_dev_samples=8, evidence_attention=True)
    assert called.code == 0, called.err
    assert "pgra evaluate --run" in called.err
    assert bench.evaluate("without", "--evidence_attention").code == 0
    assert "attention" in bench.predictions("without")[0]["evidence"][0]
    again = bench.train("without", max_dev_samples=8, evidence_attention=True)
    assert "adds it" not in again.err


def test_predict_is_a_command(run, capsys):
    assert pgra_main(["predict", "A warm film.", "--run", str(run), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("query: A warm film.")


def test_a_run_with_exemplars_by_nearest_neighbor_finds_those_of_a_new_text(bench):
    few = {"max_train_samples": 16, "max_dev_samples": 6, "max_test_samples": 4}
    run = trained(bench, "nearest", exemplars="knn", **few)
    assert read_json(run / "reader" / "pgra.json")["prompt"]["prefix"] == ""
    assert "Follow the demonstrations" in (run / "prompt.txt").read_text()
    (warm, dull) = answers(run, *TEXTS)
    assert len(warm["evidence"]) == len(dull["evidence"]) == 2
    # A test query gives what the run found for it.
    line = bench.predictions("nearest")[0]
    (again,) = answers(run, line["text"])
    assert [e["row"] for e in again["evidence"]] == [e["row"] for e in line["evidence"]]
    moved = bench.flags["train_file"].rename(bench.root / "moved.jsonl")
    called = ask(run, TEXTS[0])
    moved.rename(bench.flags["train_file"])
    assert "train.jsonl" in called.error


def remember(path, *pairs, task="sst2"):
    with FeedbackLog.open(path) as log:
        for text, label in pairs:
            log.write(text, label, task=task)
    return path


def test_a_correction_decides_a_near_text_and_no_far_one(run, tmp_path):
    before = answers(run, *TEXTS)
    other = {"negative": "positive", "positive": "negative"}[before[0]["prediction"]]
    memory = remember(tmp_path / "memory.sqlite", (TEXTS[0], other))
    near = TEXTS[0].replace("warm", "wam")
    (plain,) = answers(run, near)
    mixed, far = answers(run, near, TEXTS[1], "--memory", memory)
    assert far == before[1]
    assert mixed["prediction"] == other
    assert mixed["without_memory"] == pytest.approx(plain["scores"], abs=1e-5)
    assert mixed["scores"][other] == pytest.approx(0.4 * plain["scores"][other] + 0.6, abs=1e-5)
    letters = [len(text.casefold().rstrip(" .")) for text in (near, TEXTS[0])]
    likeness = 1 - 1 / sum(letters)  # one letter is missing
    assert mixed["memory"][0]["entry"] == 1
    assert mixed["memory"][0]["score"] == pytest.approx(likeness, abs=1e-4)
    (weak,) = answers(run, near, "--memory", memory, "--memory_weight", 0)
    assert weak["scores"] == pytest.approx(plain["scores"], abs=1e-5)
    shown = ask(run, near, "--memory", memory).out.splitlines()
    assert shown[1].startswith(f"label: {other}  (probabilities: {other}")
    assert shown[2] == f'memory: entry 1 at {likeness:.3f}: "{TEXTS[0]}" -> "{other}"'
    assert shown[3].startswith(f"without: {plain['prediction']}  (probabilities: ")


def test_a_memory_that_does_not_fit_a_run_is_refused(run, tmp_path):
    wrong = remember(tmp_path / "wrong.sqlite", ("A film.", "grand"))
    refused = ask(run, "a text", "--memory", wrong)
    assert refused.code == 2
    assert "entry 1: unknown label 'grand'. Known: negative, positive." in refused.error
    assert "there is no memory" in ask(run, "a text", "--memory", tmp_path / "none").error
    told = ask(run, "a text", "--memory", wrong, "--memory_as", "clarification").error
    assert "memory_as 'clarification' is for prompts of an LM" in told
    assert "memory_weight is 2.0: it must be from 0 to 1" in (
        ask(run, "a text", "--memory_weight", 2).error
    )
