"""Every command for a table or figure of the paper, at demo size: each YAML runs whole.

Three run on the bundled models that the YAMLs name, all others on tiny ones in their place.
"""

import json
import re
from contextlib import chdir

import pytest
from conftest import SENTENCES, write_jsonl
from scripted import call, read_json
from tiny_models import build_lm

from pgra.cli import main
from pgra.commands.ablate import main as ablate_main
from pgra.commands.consistency import main as consistency_main
from pgra.commands.report import main as report_main
from pgra.config import config_root, read_yaml
from pgra.experiments.grid import grid_names, read_grid
from pgra.report.compare import load_reference

pytestmark = pytest.mark.slow
ON_BUNDLED_MODELS = ("main", "two_cores_d", "kate_t3")
# Of tasks without bundled data.
LABELS = {"fever": ("SUPPORTS", "REFUTES"), "pairs": ("equivalent", "not_equivalent")}
# So small that a grid takes seconds: what is proven is that all runs, on real text.
SIZES = {
    **{"max_train_samples": 12, "max_dev_samples": 2, "max_test_samples": 4, "max_passages": 60},
    **{"num_candidates": 4, "num_evidence": 2, "num_exemplars": 2, "max_segment_tokens": 64},
    **{"max_steps": 1, "total_train_batch_size": 1, "device": "cpu"},
}
# What a grid needs beside that; an axis gets values that the paper has too.
OWN = {
    "d": {"axis": "num_evidence=4,8", "num_evidence": None, "num_candidates": 8},
    "fid_d": {"axis": "num_evidence=2,8", "num_evidence": None, "num_candidates": 8},
    "k": {"axis": "num_candidates=16,50", "num_candidates": None},
    "main": {"num_shots": 2},
    "large": {"num_shots": 2},
    "exemplars": {"axis": "exemplars=balanced,knn"},
    "profiles": {"max_encoder_tokens": 64},
    "prompts": {"axis": "exemplar_seed=0,1"},
    "search": {"max_steps": 8, "total_train_batch_size": None},
    "granularity": {"max_segment_tokens": 224, "axis": "max_passages=60,20", "max_passages": None},
    "two_cores_claims": {"max_steps": None, "num_evidence": None},  # its points differ in them
    "two_cores_d": {"axis": "num_evidence=0,1", "num_evidence": None},
    "two_cores_k": {"axis": "num_candidates=2,4", "num_candidates": None},
}
CLAIMS = {
    "two_cores_claims": {
        "claims": [],
        **{f"claims-{share}": ["--source_share", str(share / 100)] for share in (0, 25, 50, 75)},
    },
    "two_cores_claims_kinds": {"claims-number": ["--kind", "number"]},
}
# Rows of the paper's table whose values must stand beside ours. Of opt_size's LMs none is bundled.
OF_THE_PAPER = {
    "main": ["ICL (OPT-13b)", "k-NN", "LM-BFF", "T5-base", "RAG", "FiD", "PGRA"],
    "large": ["k-NN", "LM-BFF", "T5-large", "RAG", "FiD", "PGRA"],
    "icl": ["ICL (OPT-13b)"],
    "fid_d": ["d=8"],
    "k": ["k=16", "k=50"],
    "d": ["d=4", "d=8"],
    "seeds": ["T5-base average"],
    "retriever": ["FiD (BM25)", "PGRA (BM25)"],
    "fever": ["FiD", "PGRA"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ablations")


def data_flags(root, name, models):
    """Give the data: MR's own task on the bundled reviews, or files where nothing is bundled."""
    if name in CLAIMS:
        size = ["--num_train", "14", "--num_dev", "2", "--num_test", "4"]
        for folder, words in CLAIMS[name].items():
            words = [*words, *size, "--corpus", "bundled:wikipedia-19k"]
            words += ["--output_dir", str(root / "data" / folder)]
            assert call(main, ["data", "claims", *words]).code == 0
        return {"tasks": "claims"}
    if name.startswith("two_cores"):
        return {"tasks": "rotten-tomatoes", "corpus": "bundled:wikipedia-19k"}
    if name not in LABELS:
        return {"tasks": "mr"}
    texts = [f"{SENTENCES[i % 12]} Year {i}." for i in range(20)]
    rows = [
        {"claim": text, "sentence1": text, "sentence2": texts[(i * 5 + 1) % 20], "label": label}
        for i, (text, label) in enumerate(zip(texts, LABELS[name] * 10, strict=True))
    ]
    return {
        "train_file": write_jsonl(root / f"{name}-train.jsonl", rows[:14]),
        "test_file": write_jsonl(root / f"{name}-test.jsonl", rows[14:]),
    }


@pytest.fixture(scope="module")
def tiny_models(root, encoder_dir, t5_dirs):
    """Give flags of a grid for tiny models in place of the bundled ones."""
    lm = build_lm(root / "lm", "gpt2", window=2048)  # its tokens are short

    def give(name):
        reader = t5_dirs["byt5" if name in LABELS else "flan-t5"]  # every word is in ByT5's bytes
        flags = {"encoder": encoder_dir, "model_name_or_path": reader}
        if name == "opt_size":  # which compares LMs
            return {**flags, "axis": f"lm={lm}"}
        return {**flags, "lm": lm}

    return give


@pytest.fixture(scope="module")
def ran(root, tiny_models):
    """Run each grid once, on one folder of artefacts, and give what was said and made."""
    called = {}

    def run(name):
        if name not in called:
            models = {} if name in ON_BUNDLED_MODELS else tiny_models(name)
            flags = {**SIZES, **models, **data_flags(root, name, models), **OWN.get(name, {})}
            flags |= {"artifacts_dir": root / "artifacts", "output_dir": root / name}
            given = [word for k, v in flags.items() if v for word in (f"--{k}", str(v))]
            words = [name, "--seeds", "0", *given]
            words += [] if name.startswith("two_cores") else ["--demo"]  # small as they are
            words += [] if name == "label_consistency" else ["--drop_readers"]
            with chdir(root):  # where a grid names files itself
                called[name] = call(ablate_main, words)
        return called[name], root / name

    return run


def table_of(title, out):
    """Give the header and the rows of the first table under a title."""
    header, _, *rows = out.partition(f"{title}\n\n")[2].partition("\n\n")[0].splitlines()
    return header, rows


TRAINED = [name for name in grid_names() if read_grid(name).base.get("method") != "kate"]


@pytest.mark.parametrize("name", TRAINED)
def test_every_shipped_grid_runs_at_demo_size(ran, name):
    called, folder = ran(name)
    assert called.code == 0, called.out + called.err
    told = read_json(folder / "grid.json")
    runs = [folder / place for p in told["points"] for place in p["seeds"].values()]
    assert len(runs) == len(told["points"]) >= 1
    for run in runs:
        assert 0 <= abs(read_json(run / "metrics.json")["value"]) <= 1
    assert "missing" not in called.out
    header, rows = table_of(told["title"], called.out)
    assert len(rows) == len(runs), "a row for each point"
    assert header.endswith(" (paper)") == (name in OF_THE_PAPER)
    beside = {row.split()[-1] for row in rows}
    assert papers_values(name) <= beside
    if name == "training_cost":
        assert "seconds" in called.out


def test_a_grid_of_kate_runs_at_demo_size_beside_the_papers_values(root):
    words = ["kate_t3", "--demo", "--tasks", "sst2", "--seeds", "0", "--device", "cpu"]
    words += ["--max_train_samples", "40", "--max_test_samples", "2"]
    words += ["--output_dir", str(root / "kate"), "--artifacts_dir", str(root / "artifacts")]
    called = call(ablate_main, words)
    assert called.code == 0, called.out + called.err
    title = read_json(root / "kate" / "grid.json")["title"]
    header, rows = table_of(title, called.out)
    assert header.split() == ["point", "sst2", "sst2", "(paper)"]
    names = ("Random", "kNN (MiniLM)", "KATE (MiniLM)")
    assert all(row.startswith(name) for row, name in zip(rows, names, strict=True))
    assert rows[0].endswith(" 88.0")
    assert not re.search(r"50\.2|90\.2", "".join(rows[1:]))  # those are of other encoders


def papers_values(name):
    """Give what the paper prints for the rows of ours that it has."""
    if name not in OF_THE_PAPER:
        return set()
    table = load_reference(read_yaml(config_root() / "ablations" / f"{name}.yaml")["reference"])
    task = "fever" if name == "fever" else "mr"
    return {f"{table.rows[row][task]:.1f}" for row in OF_THE_PAPER[name]}


def test_table_3_every_querys_evidence_stands_on_the_page(ran, root):
    _, folder = ran("main")
    page = root / "main.html"
    called = call(report_main, [str(folder), "--html", str(page)])
    assert called.code == 0, called.err
    lines = (folder / "PGRA" / "seed-0" / "predictions.jsonl").read_text().splitlines()
    said = page.read_text()
    for line in map(json.loads, lines):
        assert len(line["evidence"]) == SIZES["num_evidence"]
        for text in (line["text"], *(one["text"] for one in line["evidence"])):
            assert max(re.findall(r"[\w ]+", text), key=len) in said


def test_table_10_and_figure_2_follow_from_the_grids_runs(ran, root):
    _, folder = ran("label_consistency")
    out = root / "consistency"
    words = ["--runs", str(folder), "--output_dir", str(out), "--device", "cpu"]
    called = call(consistency_main, words)
    assert called.code == 0, called.err
    told = read_json(out / "consistency.json")
    assert {run["name"]: run["queries"] for run in told["runs"]} == {"FiD": 4, "PGRA": 4}
    assert list(out.glob("*.png"))
