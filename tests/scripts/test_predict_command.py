"""A trained run, used on new texts: `pgra predict`, and what a run says of its probabilities."""

import json
import shutil

import pytest
from conftest import write_jsonl
from scripted import call, read_json, review_rows

import pgra
from pgra.artifacts import read_sealed, write_sealed
from pgra.commands.predict import main as predict_main

pytestmark = pytest.mark.slow

TEXTS = ["A warm film by the sea.", "A dull story."]


@pytest.fixture(scope="module", autouse=True)
def run(bench):
    """A run that calibrates on sixty examples."""
    dev = write_jsonl(bench.root / "dev.jsonl", review_rows(60, start=40))
    bench.flags |= {"validation_file": dev, "eval_steps": 0, "save_steps": 0}
    bench.make("pgra")
    return bench.run("pgra")


def ask(run, *words):
    return call(predict_main, [*map(str, words), "--run", str(run), "--device", "cpu"])


def answers(run, *words):
    called = ask(run, *words, "--json")
    assert called.code == 0, called.err
    return [json.loads(line) for line in called.out.splitlines()]


def test_a_moved_reader_gives_new_texts_what_the_test_set_got(bench, run, tmp_path):
    """By another way: stored evidence and evaluate's batches, or by the reader's folder alone."""
    rows = bench.predictions("pgra")[:3]
    moved = shutil.copytree(run / "reader", tmp_path / "moved")
    hidden = bench.train_file.rename(tmp_path / "hidden.jsonl")
    lines = tmp_path / "new.txt"
    lines.write_text("\n\n".join(row["text"] for row in rows))
    found = answers(moved, "--file", lines)
    assert len(pgra.Reader.load(moved, device="cpu").predict(TEXTS, [])) == 2
    hidden.rename(bench.train_file)
    for row, answer in zip(rows, found, strict=True):
        assert (answer["text"], answer["prediction"]) == (row["text"], row["prediction"])
        assert answer["scores"] == pytest.approx(row["scores"], abs=1e-5)
        for ours, theirs in zip(answer["evidence"], row["evidence"], strict=True):
            assert (ours.pop("text"), ours) == (theirs.pop("text"), pytest.approx(theirs, rel=1e-3))


def test_new_texts_are_scored_by_the_similarity_that_the_run_fitted(bench):
    name, changes = "fitted", {"similarity": "head", "max_steps": 1, "max_dev_samples": 4}
    bench.make(name, **changes)
    fitted = bench.run(name)
    row = bench.predictions(name)[3]
    (answer,) = answers(fitted, row["text"])  # alone, and without the training data
    assert answer["prediction"] == row["prediction"]
    for ours, theirs in zip(answer["evidence"], row["evidence"], strict=True):
        assert (ours["row"], ours["score"]) == (theirs["row"], pytest.approx(theirs["score"]))
    shutil.rmtree(bench.artifacts / "similarities")  # the reader has it
    shutil.rmtree(bench.artifacts / "indexes")
    assert answers(fitted, row["text"]) == [answer]


def test_a_task_of_two_inputs_takes_one_text_or_both_fields(bench, tmp_path):
    task = tmp_path / "pairs.yaml"
    task.write_text(
        "inputs: [claim, source]\nlabels: ['no', 'yes', maybe]\nprompt: '{claim} {source}'\n"
        "reader_template: '{source} {claim} <extra_id_0>'\nmetric: macro_f1\n"
        "verbalizer: {'no': terrible, 'yes': great, maybe: film}\n"
    )
    rows = [
        {"claim": row["text"], "source": "the sea", "label": ["no", "yes", "maybe"][i % 3]}
        for i, row in enumerate(review_rows(60))
    ]
    names = ("train_file", "validation_file", "test_file")
    files = {name: write_jsonl(tmp_path / f"{name}.jsonl", rows) for name in names}
    bench.make("pairs", task=task, num_evidence=0, allow_test_in_train=True, **files)
    run, pair = bench.run("pairs"), {"claim": TEXTS[0], "source": "a town on a hill"}
    assert read_json(run / "metrics.json")["metric"] == "macro_f1"
    (answer,) = answers(run, "--file", write_jsonl(tmp_path / "q.jsonl", [pair]))
    assert (answer["text"], answer["fields"]) == (f"{TEXTS[0]} a town on a hill", pair)
    (alone,) = answers(run, TEXTS[0], "--artifacts_dir", tmp_path / "none")  # it searches nothing
    assert (alone["evidence"], list(tmp_path.glob("none"))) == ([], [])
    assert alone["fields"] == {"claim": TEXTS[0], "source": ""}
    assert alone["scores"] != answer["scores"]


@pytest.fixture
def other(bench, run, tmp_path):
    """A copy of the reader whose arguments can be changed."""

    def change(**sections):
        folder = shutil.copytree(run / "reader", tmp_path / "other", dirs_exist_ok=True)
        record = read_sealed(run / "reader" / "pgra.json")
        for section, values in sections.items():
            record["arguments"][section].update(values)
        write_sealed(folder / "pgra.json", record)
        return folder

    return change


def test_another_corpus_encoder_or_lm_is_refused_by_name(bench, other, lm_dirs, encoder_dirs):
    corpus = bench.root / "another.txt"
    corpus.write_text(bench.corpus.read_text() + "One more.\n")
    refused = ask(other(corpus={"corpus": str(corpus)}), *TEXTS)
    assert "was made with corpus " in refused.error
    indexes = sorted(bench.artifacts.glob("indexes/*"))
    refused = ask(other(retriever={"encoder": str(encoder_dirs["roberta"])}), *TEXTS)
    assert "was made with encoder " in refused.error
    assert sorted(bench.artifacts.glob("indexes/*")) == indexes  # none was built for it
    refused = ask(other(rerank={"lm": str(lm_dirs["opt"])}), *TEXTS)
    assert "was made with model " in refused.error
    refused = ask(other(), *TEXTS, "--artifacts_dir", bench.root / "gone")
    assert "gone does not exist" in refused.error
    assert not (bench.root / "gone").exists()


def test_a_table_gives_what_its_texts_give(run, tmp_path):
    (tmp_path / "x.csv").write_text('n,text\n1,"A warm film, by the sea."\n2,A dull story.\n')
    (tmp_path / "x.tsv").write_text("text\tn\nA warm film, by the sea.\t1\nA dull story.\t2\n")
    asked = answers(run, "A warm film, by the sea.", "A dull story.")
    assert asked[0]["scores"] != asked[1]["scores"]
    for name in ("x.csv", "x.tsv"):
        assert answers(run, "--file", tmp_path / name) == asked
    rows = ["A warm film, by the sea.", " ", "A dull story.", ""]
    blank = write_jsonl(tmp_path / "blank.jsonl", [{"text": text} for text in rows])
    assert answers(run, "--file", blank) == [asked[0], None, asked[1], None]
