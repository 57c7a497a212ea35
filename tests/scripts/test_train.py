import csv
import shutil

import pytest
from conftest import SENTENCES, write_jsonl
from scripted import GOOD, Bench, contents, finish, half_written, read_json, review_rows

from pgra.data.tasks import load_task
from pgra.lm.load import find_model, load_tokenizer, tokenizer_identity

EVIDENCE_KEYS = ["row", "text", "stage1_rank", "stage1_score", "score"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    return Bench(tmp_path_factory.mktemp("train"), lm_dirs["gpt2"], encoder_dir, t5_dir)


@pytest.fixture(scope="module")
def first(bench):
    """The run that most tests look at."""
    called = bench.train("first")
    assert called.code == 0, called.err
    return called


def test_predictions_show_each_query_with_its_evidence(bench, first):
    lines = bench.predictions("first")
    assert [line["text"] for line in lines] == [row["text"] for row in review_rows(12, start=20)]
    for line in lines:
        assert list(line) == ["id", "text", "label", "prediction", "scores", "evidence"]
        assert list(line["scores"]) == ["negative", "positive"]
        assert sum(line["scores"].values()) == pytest.approx(1)
        assert line["prediction"] == max(line["scores"], key=line["scores"].get)
        assert len(line["evidence"]) == 2
        assert all(list(item) == EVIDENCE_KEYS for item in line["evidence"])
        assert all(item["text"] == SENTENCES[item["row"]] for item in line["evidence"])
        assert all(1 <= item["stage1_rank"] <= 6 for item in line["evidence"])
        assert line["evidence"][0]["score"] >= line["evidence"][1]["score"]
    assert len({line["id"] for line in lines}) == 12


def test_exemplars_are_not_trained_on(bench, first):
    """Forty rows, four held out, two in the prompt: the index is asked for 34 of them."""
    manifest = read_json(bench.product("candidates/sst2/train-*") / "manifest.json")
    assert manifest["counts"]["queries"] == 40 - 4 - 2


def test_a_second_run_reuses_all_and_changes_nothing(bench, first):
    before = contents(bench.root)
    again = bench.train("first")
    assert again.code == 0
    assert "(reused)" in again.out
    assert contents(bench.root) == before


def test_the_same_words_elsewhere_give_the_same_run(bench, first):
    bench.train("second", artifacts_dir=bench.root / "second")
    assert bench.predictions("second") == bench.predictions("first")
    bench.train("other-seed", seed=2, artifacts_dir=bench.root / "second")  # the control
    scores = [line["scores"] for line in bench.predictions("first")]
    assert [line["scores"] for line in bench.predictions("other-seed")] != scores


def test_no_evidence_opens_no_corpus(bench):
    called = bench.train("t5", num_evidence=0, corpus="nowhere.txt", encoder="none", lm="none")
    assert called.code == 0, called.err
    assert all(line["evidence"] == [] for line in bench.predictions("t5"))
    assert read_json(bench.run("t5") / "run.json")["method"] == "plain"


@pytest.mark.parametrize("kind", ["t5-v1.1", "mt5", "byt5"])
def test_every_kind_of_t5_trains_and_is_read_again(bench, first, t5_dirs, kind):
    called = bench.train(f"kind-{kind}", model_name_or_path=t5_dirs[kind])
    assert called.code == 0, called.err
    folder = bench.run(f"kind-{kind}")
    predictions = bench.predictions(f"kind-{kind}")
    assert predictions != bench.predictions("first")
    (folder / "predictions.jsonl").unlink()
    assert bench.evaluate(f"kind-{kind}").code == 0
    assert bench.predictions(f"kind-{kind}") == predictions
    trained, untrained = folder / "reader", t5_dirs[kind]
    first_tokens, last_tokens = (
        tokenizer_identity(load_tokenizer(find_model(str(path)))) for path in (untrained, trained)
    )
    assert first_tokens == last_tokens


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "config.json", "model.safetensors", "optimizer.pt"]
)
def test_a_checkpoint_cut_short_is_passed_over(bench, name):
    bench.train("short", num_evidence=0)
    folder, before = bench.run("short"), bench.predictions("short")
    shutil.rmtree(folder / "reader")
    path = folder / "checkpoint-2" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    called = bench.train("short", num_evidence=0)
    assert called.code == 0, called.err
    assert "going on" not in called.err
    assert bench.predictions("short") == before


def test_what_a_killed_job_half_wrote_is_not_taken_for_a_shard(bench, first):
    """The last moment to be killed: the record is written aside whole, and not yet renamed."""
    artifacts = bench.root / "killed"
    assert bench.train("before", artifacts_dir=artifacts).code == 0
    for record in list(artifacts.glob("banks/*/[0-9a-f]*.json")):
        record.rename(record.with_name(".0a1b2c3d.partial.json"))
    called = bench.train("after", artifacts_dir=artifacts)
    assert called.code == 0, called.err
    assert half_written(artifacts) == []
    assert bench.predictions("after") == bench.predictions("before")


def test_evaluate_measures_the_same_again(bench, first):
    before, lines = bench.metrics("first"), bench.predictions("first")
    called = bench.evaluate("first")
    assert called.code == 0, called.err
    assert called.out.splitlines()[-1] == first.out.splitlines()[-1]
    after = bench.metrics("first")
    assert bench.predictions("first") == lines
    for name in before:
        if name not in ("seconds", "git_commit"):
            assert after[name] == before[name], name
    assert set(after["seconds"]) == set(before["seconds"])
    assert after["seconds"]["training"] == before["seconds"]["training"]


def test_evaluate_measures_another_file_elsewhere(bench, first):
    before = contents(bench.run("first"))
    other = write_jsonl(bench.root / "other.jsonl", review_rows(6, start=30))
    assert "give --output_dir" in bench.evaluate("first", "--test_file", other).error
    called = bench.evaluate("first", "--test_file", other, "--output_dir", bench.run("other"))
    assert called.code == 0, called.err
    assert bench.metrics("other")["n"] == 3 * 2
    assert bench.predictions("other")[0]["text"] == "A funny film number 30."
    assert contents(bench.run("first")) == before


PAIRS = """
inputs: [premise, claim]
labels: ["no", maybe, "yes"]
prompt: "Premise: {premise}\\nClaim: {claim}\\nDoes it follow?"
reader_template: "{premise} So, <extra_id_0> , {claim}"
verbalizer: {"no": terrible, maybe: film, "yes": great}
metric: macro_f1
"""


def test_a_new_task_is_one_yaml(bench, tmp_path):
    yaml = tmp_path / "follows.yaml"
    yaml.write_text(PAIRS)
    labels = ["no", "maybe", "yes"]
    rows = [
        {
            "premise": f"The {GOOD[i % 4]} film, number {i}",
            "claim": f"it is {i}",
            "label": labels[i % 3],
        }
        for i in range(36)
    ]
    files = {
        "train_file": write_table(tmp_path / "train.csv", rows[:30]),
        "test_file": write_table(tmp_path / "test.tsv", rows[30:]),
    }
    name = "follows"
    called = bench.train(name, task=yaml, **files, num_exemplars=3)
    assert called.code == 0, called.err
    metrics, lines = bench.metrics(name), bench.predictions(name)
    assert (metrics["task"], metrics["metric"], metrics["n"]) == ("follows", "macro_f1", 6)
    assert list(lines[0]["scores"]) == labels
    assert lines[0]["text"] == "The funny film, number 30 it is 30"
    assert load_task(str(yaml)).labels == tuple(labels)


def write_table(path, rows):
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, list(rows[0]))
        else:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t", quoting=csv.QUOTE_NONE)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.slow
def test_two_processes_train_as_one(bench, first):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    two = {"artifacts_dir": bench.root / "two", "per_device_train_batch_size": 2}
    told = finish([*launch, "train.py", *bench.argv("two", **two)])
    assert told.count("95 % interval") == told.count("sst2: 36 training") == 1  # one speaks
    one, both = bench.predictions("first"), bench.predictions("two")
    assert bench.metrics("two")["n"] == bench.metrics("first")["n"] == len(both)
    for a, b in zip(one, both, strict=True):
        assert (a["id"], a["text"], a["label"]) == (b["id"], b["text"], b["label"])
        assert [e["row"] for e in a["evidence"]] == [e["row"] for e in b["evidence"]]
        assert [e["score"] for e in a["evidence"]] == pytest.approx(
            [e["score"] for e in b["evidence"]], rel=1e-4
        )
        assert a["scores"] == pytest.approx(b["scores"], abs=1e-3)
    # torch's launcher takes --run for its own --run-path, unless -- ends its options.
    evaluated = finish([*launch, "--", "evaluate.py", "--run", str(bench.run("two"))])
    assert evaluated.count("95 % interval") == 1
    assert bench.predictions("two") == both
