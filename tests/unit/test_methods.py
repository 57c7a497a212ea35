"""The contract of methods, over all that take PGRA's arguments; and what is each one's own."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from conftest import with_rerank, with_retriever, write_jsonl
from method_runs import having, lines_of, run_of
from tiny_models import build_t5
from transformers import T5ForConditionalGeneration

from pgra.context import ALONE
from pgra.errors import ArtifactError, ConfigError, DataError, PgraError
from pgra.methods.arguments import METHODS
from pgra.methods.base import open_method
from pgra.methods.knn import NUMBERS
from pgra.methods.stages import Stages
from pgra.report.compare import compare_runs
from pgra.report.results import Group, load_measures
from pgra.retrieval.neighbors import open_neighbor_encoder
from pgra.runs import Run, evaluate_run, run, train

RAG, LM_BFF = OUTSIDE = "ablations.rag:Rag", "ablations.lm_bff:LmBff"
WRITERS = [f"{x} answers" for x in ("fid", "pgra", "plain", RAG, "ralm")]
KINDS = [*WRITERS, *OUTSIDE, "head encoder"]  # the last's LM is an encoder


def asking(args, review_files):
    """The same texts as questions, with two answers each, of which a passage may hold one."""
    for path in review_files.values():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        answers = [["xyz"], ["warm", "xyz"], ["xyz", "FRANKFURT"]]
        asked = [{"question": row["text"], "answers": answers[i % 3]} for i, row in enumerate(rows)]
        write_jsonl(path, asked)
    return having(args, task="webquestions")


@pytest.mark.slow
@pytest.mark.parametrize("method", [*sorted({*METHODS} - {"icl", "kate"}), *KINDS])
def test_a_run_is_made_once_and_measured_again_alike(args, review_files, tmp_path, method):
    folder, (method, *kind) = tmp_path / "run", method.split()
    if kind == ["answers"]:
        args = asking(args, review_files)
    args = with_retriever(args, retriever="bm25+dense") if method == "fid" else args
    few = {"num_shots": 4, "exemplar_sets": 2} if method == LM_BFF else {}
    if kind == ["encoder"]:
        few = {"lm": args.retriever.encoder}
    mine = run_of(args, method, folder, **few)
    done = run(mine)
    assert not done.reused
    assert done.metrics["method"] == {RAG: "rag", LM_BFF: "lm-bff"}.get(method, method)
    assert done.metrics["n"] == len(lines_of(folder)) == 12
    assert run(mine).reused
    again = evaluate_run(folder, output_dir=tmp_path / "again")
    assert again.metrics["metrics"] == done.metrics["metrics"]
    assert lines_of(tmp_path / "again") == lines_of(folder)
    other = having(mine, max_test_samples=4)
    with pytest.raises(ArtifactError, match="max_test_samples"):
        run(other)
    has_prompt = method in ("head", "pgra", "ralm") and kind != ["encoder"]
    assert (folder / "prompt.txt").is_file() == has_prompt
    depth = 0 if method in ("head", "knn", LM_BFF, "plain") else 3
    assert {len(line["evidence"]) for line in lines_of(folder)} == {depth}
    if method in OUTSIDE:
        with pytest.raises(ConfigError, match=done.metrics["method"]):
            Run.load(folder, device="cpu").predict("a film")
        return
    lines = lines_of(folder)[:3]  # decided as new texts they are the same
    answers = Run.load(folder, device="cpu").predict([line["text"] for line in lines])
    for line, answer in zip(lines, answers, strict=True):
        assert answer.label == line["prediction"]
        assert dict(answer.scores) == pytest.approx(line["scores"], abs=1e-4)
        assert [each.row for each in answer.evidence] == [e["row"] for e in line["evidence"]]


@pytest.mark.slow
def test_the_report_has_columns_of_how_often_evidence_holds_an_answer(args, review_files, tmp_path):
    args, runs = with_retriever(asking(args, review_files), num_candidates=12), {}
    for method in ("fid", "random", "plain"):
        folder = run(run_of(args, method, tmp_path / method, max_steps=0)).folder
        runs[method] = load_measures(folder)
        for line in lines_of(folder) if method != "plain" else ():
            wanted = re.compile("|".join(line["answers"]), re.IGNORECASE)
            held = [wanted.search(each["text"]) is not None for each in line["evidence"]]
            assert (line["hit@1"], line["recall@3"]) == (held[0], any(held))
            assert line["recall@12"] == (len(line["answers"]) > 1)  # of the whole corpus
    study = compare_runs(Group("", [each for own in runs.values() for each in own]))
    of = "webquestions"
    assert study.columns == [of, *(f"{of} {x}" for x in ("f1", "hit@1", "recall@12", "recall@3"))]
    assert study.results["fid", f"{of} recall@12"].mean == pytest.approx(2 / 3)


def test_the_likeliest_answers_log_probability_is_stock_t5s(args, review_files, tmp_path, t5_dir):
    method = open_method(run_of(asking(args, review_files), "plain", tmp_path / "run"), ALONE)
    method.open_reader()
    asked = [replace(one, answers=("film", "a dull film")) for one in method.data.test[:3]]
    ours = method.score_answers(method.new_inputs(asked, [[]] * 3), asked)
    stock, tokenizer = T5ForConditionalGeneration.from_pretrained(t5_dir), method.tokenizer
    for question, value in zip(asked, ours, strict=True):
        ids = tokenizer(f"question: {question.text}", return_tensors="pt").input_ids
        told = [tokenizer(answer, return_tensors="pt").input_ids for answer in question.answers]
        sums = [-stock(input_ids=ids, labels=t).loss.item() * t.shape[1] for t in told]
        assert value == pytest.approx(max(sums), abs=1e-3)
        assert max(sums) - min(sums) > 1  # the control


def test_what_needs_labels_or_answers_is_refused_on_questions(args, review_files, tmp_path):
    args = asking(args, review_files)
    for method in ("head", "knn", LM_BFF):
        with pytest.raises(ConfigError, match="'webquestions'"):
            open_method(run_of(args, method, tmp_path / "run"), ALONE)
    with pytest.raises(ConfigError, match="'head'"):
        open_method(run_of(with_rerank(args, similarity="head"), "pgra", tmp_path / "run"), ALONE)
    write_jsonl(review_files["test"], [{"question": "who?", "answers": []}])
    with pytest.raises(DataError, match="line 1"):
        open_method(run_of(args, "fid", tmp_path / "run"), ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", RAG])
def test_a_reader_replaced_since_the_run_named_it_is_refused(args, t5_dir, tmp_path, name):
    reader = shutil.copytree(t5_dir, tmp_path / "reader")
    mine = having(run_of(args, name, tmp_path / "run"), model_name_or_path=str(reader))
    method = open_method(mine, ALONE)
    method.prepare()
    build_t5(reader, "flan-t5")
    with pytest.raises(ArtifactError, match="reader"):
        method.fit(tmp_path / "run")
    run(mine)  # the control: another run names the reader that is there now


# What distinguishes them.


def as_method(args, name):
    return args.having(runtime=replace(args.runtime, method=name))


# k nearest neighbors.


@pytest.mark.parametrize("encoder", ["encoder", "reader"])
def test_labels_are_the_nearest_examples(args, tmp_path, encoder):
    args = with_retriever(args, num_neighbors=1, neighbor_encoder=encoder)
    data = Stages.read(as_method(args, "knn"), ALONE).data
    model = open_neighbor_encoder(args.retriever, args.reader.model_name_or_path, "cpu")
    train, test = (
        model.encode([example.text for example in part]) for part in (data.train, data.test)
    )
    nearest = (test @ train.T).argmax(axis=1)
    folder = run(run_of(args, "knn", tmp_path / "knn")).folder
    expected = [data.train[row].label for row in nearest]
    assert [line["prediction"] for line in lines_of(folder)] == expected


@pytest.mark.slow
def test_the_dev_set_chooses_how_many_vote(args, tmp_path):
    done = run(run_of(args, "knn", tmp_path / "knn")).training
    values = {}
    for number in [number for number in NUMBERS if number <= 36]:  # the same, one by one
        own = run_of(with_retriever(args, num_neighbors=number), "knn", tmp_path / f"k{number}")
        method = run(own).method
        decided = [one.label for one in method.decide(method.data.dev).predictions]
        values[number] = method.data.measure_dev(decided)["accuracy"]
    best = max(values, key=values.get)
    assert (done["num_neighbors"], done["value"]) == (best, values[best])


@pytest.mark.slow
def test_a_run_of_relative_paths_is_used_from_elsewhere(
    review_files, encoder_dir, tmp_path, monkeypatch
):
    home = tmp_path / "home"
    (home / "sst2").mkdir(parents=True)  # a folder of the task's name is no path
    shutil.copy(review_files["train"], home)
    shutil.copytree(encoder_dir, home / "encoder")
    monkeypatch.chdir(home)
    how = {"encoder": "encoder", "artifacts_dir": "artifacts"}
    folder = train("sst2", "train.jsonl", method="knn", **how).folder
    monkeypatch.chdir(tmp_path)
    assert Run.load(home / folder).predict("A dull town.")
    moved = home.rename(tmp_path / "moved")
    with pytest.raises(PgraError):
        Run.load(moved / folder).predict("A dull town.")
    monkeypatch.chdir(moved)
    assert Run.load(folder).predict("A dull town.")
