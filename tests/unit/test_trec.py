"""TREC's files: what is written is read again, and what is wrong is named with its line."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SENTENCES, write_jsonl
from small_index import World

from pgra.cli import main
from pgra.errors import DataError
from pgra.retrieval.trec import (
    RunFileArguments,
    find_docnos,
    measure_run,
    read_qrels,
    read_query_table,
    warn_of_unknown,
)
from pgra.types import Candidates

QUERIES = {"q1": "red apple trees by the sea", "7": "Critics of the film"}


@pytest.fixture
def world(tmp_path, encoder_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, encoder_dir)


@pytest.fixture
def open_run(world):
    """Open a run file of these lines, of `QUERIES`, or of the queries in `asked`."""

    def open_run(lines, asked=None, **changes):
        world.write("run.txt", lines)
        queries = world.write_queries("q.tsv", asked or QUERIES)
        options = RunFileArguments(run_queries=str(queries))
        return world.open("run:run.txt", options=options, **{"num_candidates": 2, **changes})

    return open_run


WHOLE = ["q1 Q0 4 1 2.5 x", "7 Q0 0 1 9 x", "q1 Q0 3 2 1.5 x", "7 Q0 11 2 8 x"]


def test_what_a_search_wrote_is_found_again_and_an_edited_line_is_not(world, open_run):
    lines = world.write_run("dense.txt", QUERIES, 5).read_text().splitlines()
    dense = world.open().retrieve(list(QUERIES.values()), 5)
    found = open_run(lines, num_candidates=5)
    again = found.retrieve([f" {text}\n" for text in QUERIES.values()], 5)  # white space aside
    np.testing.assert_array_equal(again.rows, dense.rows)
    np.testing.assert_array_equal(again.scores, dense.scores)  # to the last bit
    cells = lines[1].split()
    new = next(row for row in range(12) if row not in dense.rows[0])
    lines[1] = " ".join([*cells[:2], str(new), *cells[3:]])
    edited = open_run(lines, num_candidates=5)
    assert edited.retrieve(list(QUERIES.values()), 5).rows[0, 1] == new
    assert edited.fingerprint != found.fingerprint


BAD_LINES = {
    "run.txt": "7 Q0 0 1 9",
    "nan": "7 Q0 0 1 nan x",
    "1e.99": "7 Q0 0 1 1e99 x",
    "'4'": "q1 Q0 4 2 2 x",
    "'07'": "7 Q0 07 1 9 x",
}


@pytest.mark.parametrize("message", BAD_LINES)
def test_a_line_that_would_give_a_wrong_number_is_refused(open_run, message):
    with pytest.raises(DataError, match=message):
        open_run([WHOLE[0], BAD_LINES[message], *WHOLE[2:]])


# Queries and judgements.


HEADERS = ("_id", "#ID", "queryId", "topic id")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("q.tsv", 'a\tone text\n\n17\tanother, "quoted"\n', ["a", "17"]),
        *(("q.tsv", f"{head}\ttext\n17\tone", ["17"]) for head in HEADERS),
        *(("q.tsv", f"{query}\ttext\n17\tone", [query, "17"]) for query in ("q1", "grid", "1")),
        ("q.csv", 'id,text,more\na,"one, text",x\n17,two,y\n', ["a", "17"]),
        ("q.jsonl", '{"_id": "a", "text": "one"}\n{"id": 17, "text": "two"}\n', ["a", "17"]),
    ],
)
def test_queries_are_read_by_their_ids_and_a_header_is_none(world, caplog, name, text, expected):
    path = world.write(name, [text])
    assert list(read_query_table(path)) == expected
    assert ("is a header and left out" in caplog.text) == (text.split("\t")[0] in HEADERS)


def measure(*inputs):
    return {name: values.mean() for name, values in measure_run(*inputs).items()}


def test_measures_are_those_worked_out_by_hand(world):
    """q1's only relevant passage is its second: nDCG 1/log2(3), RR 1/2, P@10 0.1, R 1.

    Query 7 has 2 relevant ones, the first found first: nDCG 1 / (1 + 1/log2(3)), RR 1, R 1/2.
    """
    found = Candidates(np.array([[4, 3], [0, 11]]), np.array([[2.5, 1.5], [9, 8]], np.float32))
    docnos = find_docnos(world.corpus(), found)
    qrels = world.write("qrels", ["q1 0 3 1", "7 0 0 1", "7 0 5 1", "7 0 11 0", "other 0 3 1"])
    means = measure(read_qrels(qrels), list(QUERIES), found, docnos)
    half = 1 / np.log2(3)
    expected = {"nDCG@10": (half + 1 / (1 + half)) / 2, "RR@10": 0.75, "P@1": 0.5, "P@10": 0.1}
    assert means == pytest.approx({**expected, "R@2": 0.75, "R@10": 0.75})
    turned = Candidates(found.rows[:, ::-1], found.scores)  # the control: the other order
    assert measure(read_qrels(qrels), list(QUERIES), turned, docnos) != pytest.approx(means)
    with pytest.raises(DataError, match="'z'"):
        measure_run(read_qrels(qrels), ["z"], Candidates(found.rows[:1], found.scores[:1]), docnos)


def test_judgements_of_beir_are_those_of_trec(world):
    trec = read_qrels(world.write("a", ["q1 0 3 1", "7 0 0 -1"]))
    beir = world.write("b.tsv", ["query-id\tcorpus-id\tscore", "q1\t3\t1", "7\t0\t-1"])
    assert read_qrels(beir) == trec == {"q1": {"3": 1}, "7": {"0": -1}}
    for lines in (["q1 3 1"], ["q1 0 3 yes"], ["q1 0 3 1", "q1 0 3 1"]):
        with pytest.raises(DataError, match="bad"):
            read_qrels(world.write("bad", lines))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_all_measures_see_the_order_of_the_run_where_scores_are_equal(rank):
    found = Candidates(np.array([[0, 1, 2]]), np.array([[1, 1, 1]], np.float32))
    judged = {"q": {"bca"[rank - 1]: 1}}
    means = measure(judged, ["q"], found, {0: "b", 1: "c", 2: "a"})
    assert means["RR@10"] == pytest.approx(1 / rank)
    assert means["nDCG@10"] == pytest.approx(1 / np.log2(rank + 1))


# What passages are called.


def test_passages_with_names_are_all_kept_and_judged_by_them(world, caplog):
    texts = ["one", "", "two", "one", " three "]
    rows = [{"_id": f"d{n}", "text": text} for n, text in enumerate(texts)]
    first = write_jsonl(world.root / "a.jsonl", rows)
    table = pa.table({"text": ["two", "four", None], "_id": [8, 9, 10]})
    pq.write_table(table, world.root / "b.parquet")
    files = (first, world.root / "b.parquet")
    corpus = world.corpus(*files, corpus_id="_id")
    names = ["d0", "d1", "d2", "d3", "d4", "8", "9", "10"]
    assert list(corpus.names()) == list(zip(names, [0, -1, 1, 2, 3, 4, 5, -1], strict=True))
    dropped = world.corpus(*files)  # the control: without names the first of equals stays
    assert list(dropped.names()) == [("0", 0), ("1", 1), ("2", 2), ("3", 3)]
    warn_of_unknown(corpus, [{"d0": 1, "d1": 1}, {"x": 2}])
    assert "2 of 3 relevant passages are not in the corpus (such as 'd1')" in caplog.text


@pytest.mark.parametrize("other", ["a", "b c", "", None])
def test_passages_without_one_name_each_are_refused(world, other):
    rows = [{"id": "a", "text": "one"}, {"id": other, "text": "two"}]
    path = write_jsonl(world.root / "c.jsonl", rows)
    found = Candidates(np.array([[0, 1]]), np.array([[2, 1]], np.float32))
    with pytest.raises(DataError, match="'a'|'id'"):
        find_docnos(world.corpus(path, corpus_id="id"), found)


# The commands.


@pytest.fixture
def flags(world):
    rows = [{"name": f"d{n}", "text": text} for n, text in enumerate(SENTENCES)]
    corpus = write_jsonl(world.root / "corpus.jsonl", rows)
    world.write_queries("q.tsv", {**QUERIES, "third": SENTENCES[4]})
    world.write("qrels", ["third 0 d4 1"])
    return [
        *("--corpus", str(corpus), "--corpus_id", "name", "--artifacts_dir", "artifacts"),
        *("--queries", "q.tsv", "--device", "cpu", "--encoder", str(world.encoder)),
    ]


def test_a_search_writes_a_run_that_is_searched_alike(world, flags, capsys):
    assert main(["search", *flags, "--trec", "out/run.txt", "--qrels", "qrels"]) == 0
    told = capsys.readouterr().out
    assert "RR@10    1.0000\n  P@1      1.0000\n  P@10     0.1000\n" in told
    lines = [line.split() for line in (world.root / "out/run.txt").read_text().splitlines()]
    assert len(lines) == 36
    assert lines[24][:4] == ["third", "Q0", "d4", "1"]
    shown = ["search", *flags, "--num_candidates", "3"]
    assert main(shown) == 0
    dense = capsys.readouterr().out
    assert main([*shown, "--retriever", "run:out/run.txt", "--run_queries", "q.tsv"]) == 0
    assert capsys.readouterr().out == dense


@pytest.fixture
def irds(world, monkeypatch):
    """A data set of ir_datasets with titles, and its parts as files."""
    ir_datasets = pytest.importorskip("ir_datasets", reason="needs the extra `trec`")
    from ir_datasets.datasets.beir import BeirTitleDoc
    from ir_datasets.formats import TsvDocs
    from ir_datasets.util import LocalDownload

    rows = [{"_id": f"d{n}", "text": f"{n} {text}"} for n, text in enumerate(SENTENCES)]
    write_jsonl(world.root / "docs.jsonl", rows)
    docs = world.write("docs.tsv", [f"d{n}\t{text}\t{n}" for n, text in enumerate(SENTENCES)])
    queries = world.write_queries("q.tsv", QUERIES)
    qrels = world.write("qrels", ["q1 0 d4 1", "7 0 d0 2"])
    titled = TsvDocs(LocalDownload(docs), BeirTitleDoc)
    data = ir_datasets.Dataset(titled, ir_datasets.create_dataset(None, queries, qrels))
    monkeypatch.setitem(ir_datasets.registry._registered, "toy", data)


def test_a_data_set_of_ir_datasets_is_searched_as_its_files(world, irds, capsys):
    outputs = []
    for words in (
        "--corpus docs.jsonl --corpus_id _id --queries q.tsv --qrels qrels",
        "--corpus irds:toy --queries irds:toy --qrels irds:toy",
        "--corpus irds:toy --queries q.tsv --qrels qrels --corpus_field title",  # the control
    ):
        words += f" --encoder {world.encoder} --artifacts_dir artifacts --trec run.txt"
        assert main(["search", *words.split()]) == 0
        outputs.append((capsys.readouterr().out, (world.root / "run.txt").read_text()))
    assert outputs[0] == outputs[1] != outputs[2]


def test_what_ir_datasets_lacks_is_refused_with_what_it_has(world, irds):
    with pytest.raises(DataError, match="Did you mean 'toy'"):
        world.corpus("irds:toys")
    with pytest.raises(DataError, match="no qrels.*'beir/"):
        read_qrels("irds:beir")


@pytest.mark.parametrize("name", ["q.tsv", "qrels", "corpus.jsonl", "run:first.txt"])
def test_a_run_is_not_written_over_what_is_read(world, flags, capsys, name):
    words = ["--qrels", "qrels", "--trec", name.removeprefix("run:")]
    if name.startswith("run:"):
        world.write("first.txt", ["third Q0 d4 1 1 tag"])
        words += ["--retriever", name, "--run_queries", "q.tsv"]
    assert main(["search", *flags, *words]) == 2
    assert "name another" in capsys.readouterr().err


def test_a_querys_own_text_is_left_out_of_its_run(world, flags):
    world.write_queries("q.tsv", {"q": f" {SENTENCES[4]} "})
    for words in ([], ["--drop_self"]):
        found = ["search", *flags, "--num_candidates", "3", "--trec", "own.txt", *words]
        assert main(found) == 0
        names = [line.split()[2] for line in (world.root / "own.txt").read_text().splitlines()]
        assert (len(names), "d4" in names) == (3 - len(words), not words)
