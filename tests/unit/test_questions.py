"""Questions as a task: answers in passages, what a reader writes, what a run and its report say."""

from dataclasses import replace

import pytest
from conftest import SENTENCES, with_rerank, with_retriever, write_jsonl
from method_runs import lines_of, run_of
from small_training import lively

from pgra.core import ALONE, Example, Prediction
from pgra.data.examples import AnsweredExample
from pgra.data.tasks import GenerationTask
from pgra.errors import ConfigError, DataError
from pgra.lm.load import find_model, load_tokenizer
from pgra.methods.base import Decisions, measure_answers
from pgra.prompts import Verbalizer
from pgra.reader.inputs import SegmentLayout, build_inputs
from pgra.reader.predict import T5Classifier
from pgra.report.compare import compare_runs
from pgra.report.metrics import f1, has_answer
from pgra.report.results import Group, load_measures
from pgra.runs import open_method, run

ASKED = {"where does it flow?": "Frankfurt", "when was he born?": "1925", "who sang?": "Ann Lee"}


@pytest.fixture
def asked(args, tmp_path):
    """A run on three questions, whose candidates are the corpus; it answers two."""
    rows = [{"question": name, "answers": [answer, "-"]} for name, answer in ASKED.items()]
    train = [{"question": f"what is {text}", "answers": "red apples"} for text in SENTENCES]
    files = {name: write_jsonl(tmp_path / f"{name}.jsonl", own) for name, own in
             (("train", train), ("test", rows))}  # fmt: skip
    data = replace(args.data, task="webquestions", max_dev_samples=3)
    data = replace(data, train_file=str(files["train"]), test_file=str(files["test"]))
    return with_retriever(args.having(data=data), num_candidates=12)


def test_an_answer_stands_in_a_passage_as_whole_tokens_in_a_row():
    assert has_answer("The river flows through FRANKFURT, to New  York.", ["x", "frankfurt"])
    assert has_answer("Beyonce\u0301 sang it in the U.S.A.", ["Beyoncé"])
    assert has_answer("in the U.S.A.", ["u.s.a"])
    assert not has_answer("He met a Frankfurter.", ["Frankfurt"])
    assert not has_answer("New and old York", ["New York"])


def test_answers_are_measured_and_each_has_its_line():
    found = [AnsweredExample(x, {"question": x}, y, (y,)) for x, y in ASKED.items()]
    said = [Prediction(x.id, y, {}) for x, y in zip(found, ["the frankfurt.", "in 1925", "Bo"])]  # noqa: B905
    task, more = GenerationTask.load("webquestions"), {"hit@1": [1.0, 0.0, 0.0]}
    decided = measure_answers(task, found, Decisions(said), more)
    assert decided.values == pytest.approx({"exact_match": 1 / 3, "f1": 5 / 9, "hit@1": 1 / 3})
    assert [line["f1"] for line in decided.details] == pytest.approx([1, 2 / 3, 0], abs=1e-6)
    assert [line["is_right"] for line in decided.details] == [True, False, False]
    assert f1("a big red car", ["no", "the red car"]) == pytest.approx(0.8)  # 2 of 3, 2 of 2


def test_a_reader_writes_what_stock_generate_writes(t5_dir):
    reader, tokenizer = lively(t5_dir), load_tokenizer(find_model(str(t5_dir)))
    reader.model.generation_config.max_new_tokens = 9
    words = Verbalizer({}, "ask: {text}")
    examples = [Example(text, {"text": text}) for text in SENTENCES[:5]]
    layout = SegmentLayout(words.template)
    inputs = build_inputs(examples, [[]] * 5, tokenizer, words, layout=layout)
    texts = T5Classifier(reader, tokenizer, words, batch_tokens=40).write(inputs)
    for text, example in zip(texts, examples, strict=True):
        ids = tokenizer(f"ask: {example.text}", return_tensors="pt").input_ids
        stock = reader.model.generate(input_ids=ids, max_new_tokens=9, do_sample=False)
        assert text == tokenizer.decode(stock[0], skip_special_tokens=True).strip()
    assert len(set(texts)) > 1


@pytest.mark.slow
def test_the_report_has_a_column_of_recall_for_each_depth(asked, tmp_path):
    runs = {}
    for method in ("fid", "random", "plain"):
        folder = run(run_of(asked, method, tmp_path / method, max_steps=0)).folder
        runs[method] = load_measures(folder)
        for line in lines_of(folder) if method != "plain" else ():
            held = [line["answers"][0] in each["text"] for each in line["evidence"]]
            assert (line["hit@1"], line["recall@3"]) == (held[0], any(held))
            assert line["recall@12"] == (line["answers"][0] != "Ann Lee")  # all but the control
    study = compare_runs(Group("", [each for own in runs.values() for each in own]))
    of = "webquestions"
    assert study.columns == [of, *(f"{of} {x}" for x in ("f1", "hit@1", "recall@12", "recall@3"))]
    assert study.results["fid", f"{of} recall@12"].mean == pytest.approx(2 / 3)
    assert ("plain", f"{of} hit@1") not in study.results
    assert study.comparisons["random", f"{of} hit@1"].shared == 1
    assert "none of the 3 predictions is right" in runs["fid"][0].metrics["notes"]


def test_what_needs_labels_or_answers_is_refused_on_questions(asked, tmp_path):
    for method in ("head", "knn", "lm-bff"):
        with pytest.raises(ConfigError, match="'webquestions' has no labels"):
            open_method(run_of(asked, method, tmp_path / "run"), ALONE)
    with pytest.raises(ConfigError, match="similarity 'head' learns labels, and this task has"):
        open_method(run_of(with_rerank(asked, similarity="head"), "pgra", tmp_path / "run"), ALONE)
    write_jsonl(tmp_path / "test.jsonl", [{"question": "who?", "answers": []}])
    with pytest.raises(DataError, match=r"test.jsonl, line 1: an input is blank, or there is no a"):
        open_method(run_of(asked, "fid", tmp_path / "run"), ALONE)
