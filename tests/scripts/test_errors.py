"""What a user can get wrong: one line that names it, exit code 2, and nothing half-written."""

import errno
import os

import pytest
from conftest import SENTENCES, largest_file, write_jsonl
from scripted import (
    Bench,
    call,
    contents,
    half_written,
    review_rows,
)
from tiny_models import build_encoder, build_lm

from index_build.__main__ import main as index_main
from pgra.commands.train import main as train_main

ROWS = review_rows(40)


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    return Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    """For mistakes that are found before anything is written."""
    return Bench(tmp_path_factory.mktemp("errors"), lm_dirs["gpt2"], encoder_dir, t5_dir)


def made(bench, name):
    called = bench.train(name)
    assert called.code == 0, called.err
    return bench.run(name)


def index_flags(bench, **changes):
    flags = {"corpus": bench.corpus, "encoder": bench.encoder, "artifacts_dir": bench.artifacts}
    return [w for k, v in {**flags, "device": "cpu", **changes}.items() for w in (f"--{k}", str(v))]


CORPORA = {
    "missing": (None, "corpse.txt does not exist. Near it: corpus.txt."),
    "empty": (b"", "corpse.txt is empty"),
    "blank": (b"\n \n\n", "corpse.txt holds no passage: all of its lines are blank"),
    "binary": (b"text\n\x00\x01\x02", "corpse.txt, line 2: a NUL byte, so this is a binary"),
    "latin": (b"caf\xe9\n", "corpse.txt, line 1, byte 4: 0xe9 is not UTF-8; convert the file"),
}


@pytest.mark.parametrize("main", [index_main, train_main], ids=["index_build", "train"])
@pytest.mark.parametrize("kind", sorted(CORPORA))
def test_a_corpus_that_cannot_be_read(bench, kind, main):
    data, message = CORPORA[kind]
    path = bench.root / "corpse.txt"
    if data is not None:
        path.write_bytes(data)
    flags = bench.argv("x", corpus=path) if main is train_main else index_flags(bench, corpus=path)
    told = call(main, flags).error
    assert message in told
    assert str(path) in told
    assert not bench.run("x").exists()
    # At most the lock of a folder that was never made.
    assert [name for name in contents(bench.artifacts) if not name.endswith(".lock")] == []


NAMES = [
    ({"task": "trek"}, "unknown task 'trek'. Did you mean 'trec'? Known: cola, "),
    ({"retriever": "dens"}, "unknown retriever 'dens'. Did you mean 'dense'? Known: bm25, dense"),
    ({"reranker": "promted"}, "unknown reranker 'promted'. Did you mean 'prompted'?"),
    ({"similarity": "cosin"}, "unknown similarity 'cosin'. Did you mean 'cosine'?"),
    ({"decode": "oficial"}, "unknown decode 'oficial'. Did you mean 'official'?"),
    ({"profile": "papper"}, "unknown profile 'papper'. Did you mean 'paper'?"),
    ({"pooling": "maen"}, "unknown pooling 'maen'. Did you mean 'mean'?"),
    ({"model_name_or_path": "bundled:t5-smal-titles"}, "Did you mean 't5-small-titles'?"),
    ({"lm": "bundled:smollm2-135"}, "Did you mean 'smollm2-135m'?"),
    ({"encoder": "bundled:minilm"}, "Did you mean 'minilm-l6'?"),
    ({"corpus": "bundled:wikipedia"}, "Did you mean 'wikipedia-19k'?"),
    ({"dataset_name": "bundled:rotten-tomatos", "train_file": None}, "'rotten-tomatoes'?"),
    ({"num_evidense": 2}, "unknown argument '--num_evidense'. Did you mean '--num_evidence'?"),
    ({"device": "cuda:99"}, "cannot use device 'cuda:99'"),
    ({"device": "gpu"}, "cannot use device 'gpu'"),
    ({"num_evidence": 7}, "num_evidence (7) exceeds num_candidates (6): the reranker can only"),
    ({"num_candidates": 13}, "num_candidates (13) exceeds the corpus (12 passages): lower it"),
    ({"num_candidates": 0}, "num_candidates is 0: it must be at least 1"),
    ({"num_exemplars": 36}, "all 36 training examples stand in the prompt: lower --num_exemplars"),
    ({"num_exemplars": 99}, "num_exemplars is 99, but there are only 36 training examples"),
    (
        {"max_steps": "ten"},
        "argument --max_steps/--max-steps: invalid int value: 'ten'. See --help",
    ),
    ({"task": None}, "--task is missing: name one"),
    ({"config": "nowhere.yaml"}, "cannot read nowhere.yaml: No such file"),
    ({"train_file": None, "test_file": None, "dataset_name": "no-such-folder"}, "no-such-folder"),
    ({"lm": "no/such-model"}, "cannot find model 'no/such-model': it is no folder here"),
    ({"test_file": "none.jsonl"}, "none.jsonl does not exist"),
    ({"fp16": True}, "fp16 is True: it overflows in a T5 and gives NaN: use --bf16"),
    ({"max_segment_tokens": 8}, "max_segment_tokens (8) is less than the reader template's own"),
    ({"index_factory": "IVF9999,Flat"}, "has 9999 lists, the corpus 12 passages: use Flat"),
    ({"index_factory": "Flatt"}, "index_factory 'Flatt' does not work for 16-wide vectors"),
    ({"max_encoder_tokens": 999}, "max_encoder_tokens is 999"),
]


@pytest.mark.parametrize(("change", "message"), NAMES, ids=[str(change) for change, _ in NAMES])
def test_a_name_or_number_that_cannot_work(shared, change, message):
    called = shared.train("never", **change)
    assert message in called.error
    assert not shared.run("never").exists() or "metrics.json" not in contents(shared.run("never"))
    assert half_written(shared.root) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "A film."}, "line 41: no column 'label'. Found: text."),
        ({"text": "A film.", "label": None}, "line 41: has no label"),
        ({"text": "A film.", "label": ""}, "line 41: has no label"),
        (
            {"text": "A film.", "label": "positiv"},
            "line 41: unknown label 'positiv'. Did you mean 'positive'?",
        ),
        ({"text": "A film.", "label": 2}, "line 41: unknown label '2'. Known: negative, positive"),
        ({"texts": "A film.", "label": 1}, "line 41: no column 'text'. Did you mean 'texts'?"),
        ({"text": 7, "label": 1}, "line 41: 'text' is 7, not text"),
    ],
)
@pytest.mark.parametrize("flag", ["train_file", "test_file"])
def test_a_row_that_cannot_be_used(shared, tmp_path, flag, row, message):
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, row])
    told = shared.train("never", **{flag: path}).error
    assert message in told
    assert str(path) in told
    assert not shared.run("never").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "A film.", "label": 1}\n{"text": "A\n', "line 2: not JSON"),
        ("a.jsonl", "[1, 2]\n", "line 1: a list, not a JSON object"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.csv", "text,label\n", "a.csv holds no example"),
        ("a.csv", "text,label\na,b,c\n", "line 2: 3 cells under a header of 2 (text, label)"),
        ("a.csv", 'text,label\n"a,1\n', "not valid csv"),
        ("a.tsv", "text\tlabels\nA film.\t1\n", "no column 'label'. Did you mean 'labels'?"),
        ("a.xlsx", "PK", "has a suffix that is not read here: use .jsonl, .csv, .tsv"),
    ],
)
def test_a_test_file_that_cannot_be_read(shared, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    told = shared.train("never", test_file=tmp_path / name).error
    assert message in told
    assert str(tmp_path / name) in told


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("num_evidense: 2\n", "unknown key 'num_evidense'. Did you mean 'num_evidence'?"),
        ("learning_rate: 1e-4\n", "learning_rate is '1e-4', a str; it must be float (write it as"),
        ("num_evidence: two\n", "num_evidence is 'two', a str; it must be int"),
        ("bf16: 1\n", "bf16 is 1, a int; it must be bool"),
        ("num_evidence: true\n", "num_evidence is True, a bool; it must be int"),
        ("[1, 2]\n", "must be a mapping of names to values"),
        ("a: [\n", "is not valid YAML"),
        ("num_candidates: 3\nnum_evidence: 4\n", "num_evidence (4) exceeds num_candidates (3)"),
    ],
)
def test_a_yaml_that_cannot_work(shared, tmp_path, yaml, message):
    (tmp_path / "mine.yaml").write_text(yaml)
    own = {"num_evidence": None, "num_candidates": None}
    assert message in shared.train("never", config=tmp_path / "mine.yaml", **own).error
    assert not shared.run("never").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("great, positive: great", "verbalizer has 'great' for both 'negative' and 'positive'"),
        (
            "漢字, positive: great",
            "verbalizer word '漢字' of label 'negative' is not in the reader",
        ),
    ],
)
def test_verbalizer_words_that_cannot_be_told_apart(shared, tmp_path, words, message):
    (tmp_path / "mine.yaml").write_text(
        'labels: [negative, positive]\nprompt: "{text}"\nreader_template: "{text} <extra_id_0>"\n'
        f"verbalizer: {{negative: {words}}}\n"
    )
    assert message in shared.train("never", task=tmp_path / "mine.yaml").error


def test_verbalizer_words_that_begin_alike_collide_for_the_papers_decode(shared, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        'labels: [negative, positive]\nprompt: "{text}"\nreader_template: "{text} <extra_id_0>"\n'
        "verbalizer: {negative: great film, positive: great}\n"
    )
    told = shared.train("never", task=tmp_path / "mine.yaml", decode="official").error
    assert "'great film' (negative) and 'great' (positive) begin with one token" in told
    assert "choose another word" in told


def test_a_prefix_over_the_lms_window_is_refused(shared, tmp_path):
    lm = build_lm(tmp_path / "small", "gpt2", window=64)
    told = shared.train("never", lm=lm, num_exemplars=8).error
    assert "window" in told or "64" in told
    assert "--num_exemplars" in told or "num_exemplars" in told


def test_a_text_too_long_is_cut_and_counted(bench, tmp_path):
    lm = build_lm(tmp_path / "small", "gpt2", window=128)
    flags = {"lm": lm, "num_candidates": 12, "num_exemplars": 1}
    assert ", 0 texts cut" in bench.train("whole", **flags).err
    bench.corpus.write_text("\n".join([*SENTENCES[:-1], "the sea " * 300]) + "\n")
    called = bench.train("cut", **flags)
    assert called.code == 0, called.err
    assert ", 1 texts cut" in called.err


def test_an_index_of_another_corpus_or_encoder_is_refused(bench, tmp_path):
    index = tmp_path / "index"
    assert call(index_main, index_flags(bench, output_dir=index)).code == 0
    before = contents(index)
    other = build_encoder(tmp_path / "roberta", "roberta")
    told = bench.train("x", index_dir=index, encoder=other).error
    assert f"{index} was made with " in told
    assert "this run asks for" in told
    bench.corpus.write_text("\n".join(SENTENCES[::-1]) + "\n")
    told = bench.train("x", index_dir=index).error
    assert f"{index} was made with corpus_sha256" in told
    assert f"{tmp_path / 'none'} does not exist" in (
        bench.train("x", index_dir=tmp_path / "none").error
    )
    assert contents(index) == before
    assert not bench.run("x").exists()


def test_a_damaged_lm_is_named(shared, tmp_path):
    lm = build_lm(tmp_path / "lm", "gpt2")
    weights = lm / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"cannot load model '{lm}'" in shared.train("never", lm=lm).error


@pytest.mark.parametrize(
    ("change", "blocked"),
    [("output_dir", "file/run"), ("artifacts_dir", "file/artifacts"), ("output_dir", "file")],
)
def test_an_output_below_a_file_is_refused(shared, tmp_path, change, blocked):
    (tmp_path / "file").write_text("mine")
    called = shared.train("never", **{change: tmp_path / blocked})
    assert str(tmp_path / "file") in called.error
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("flag", ["output_dir", "artifacts_dir"])
def test_no_write_permission_is_said(bench, tmp_path, flag):
    (tmp_path / "shut").mkdir(mode=0o555)
    told = bench.train("x", **{flag: tmp_path / "shut" / "in"}).error
    assert "permission" in told
    assert "choose" in told


def test_a_run_that_may_not_be_written_is_refused_before_the_long_stages(bench, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # what the system tells a user
    assert "no permission: choose a folder you may write to" in bench.train("x").error
    assert not bench.artifacts.exists()


def test_a_full_disk_is_said_and_the_same_command_goes_on(bench, monkeypatch):
    """Whichever file does not fit, nothing half-written stays; with room, the run goes on."""
    fsync, handles, places = os.fsync, [], (2, 5, 9, 20, 45)

    def full(handle):
        handles.append(handle)
        if len(handles) in places:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    for place in places:
        told = bench.train("x").error
        assert len(handles) == place
        assert "the disk is full" in told or "No space left" in told
        assert str(bench.root) in told
        assert half_written(bench.root) == []
        assert "metrics.json" not in contents(bench.root)
    assert bench.train("x").code == 0
    broken = bench.predictions("x")
    assert bench.train("whole", artifacts_dir=bench.root / "other").code == 0
    assert broken == bench.predictions("whole")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2_000, 30_000, 100_000])
def test_a_file_larger_than_the_system_allows_is_one_line(bench, limit):
    """Everything that writes meets a real limit: our code, safetensors, tokenizers, torch.save."""
    with largest_file(limit):
        called = bench.train("x")
    assert called.error.startswith("cannot ")
    assert half_written(bench.root) == []
    assert bench.train("x").code == 0
