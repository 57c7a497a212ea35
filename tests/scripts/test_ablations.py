"""Every command of docs/reproduce.md runs, on tiny models and real text.

The page is where the commands are read: a table or figure that it names is one that can be made.
"""

import csv
import importlib
import json
import re
import shlex
from contextlib import chdir
from pathlib import Path

import pytest
import yaml
from conftest import SENTENCES, write_jsonl
from scripted import ROOT, call, read_json
from tiny_models import build_encoder, build_lm

from ablations.label_consistency import main as measure
from pgra.cli import main
from pgra.commands.ablate import main as ablate_main
from pgra.commands.report import main as report_main
from pgra.config import list_yamls
from pgra.experiments.grid import read_grid
from pgra.memory.families import load_family

PAGE = (ROOT / "docs/reproduce.md").read_text()
COMMANDS = re.findall(r"^\| [^`|]+ \| `([^`]+)` \|", PAGE, re.M)
# So small that a grid takes seconds: what is proven is that all runs, on real text.
SIZES = {
    **{"max_train_samples": 12, "max_dev_samples": 2, "max_test_samples": 4, "max_passages": 60},
    **{"num_candidates": 4, "num_evidence": 2, "num_exemplars": 2, "max_segment_tokens": 64},
    **{"max_steps": 1, "total_train_batch_size": 1},
}
# Axes with few values, of which the paper has some too.
AXES = {
    "d": {"num_evidence": [4, 8]},
    "fid_d": {"num_evidence": [2, 8]},
    "k": {"num_candidates": [16, 50]},
    "granularity": {"max_passages": [60]},
    "kate_f2l": {"num_exemplars": [1]},
    "kate_f2r": {"max_train_samples": [8]},
}
# What a grid needs beside that.
OWN = {
    "d": {"num_evidence": None, "num_candidates": 8},
    "fid_d": {"num_evidence": None, "num_candidates": 8},
    "k": {"num_candidates": None},
    "rag_and_lm_bff": {"num_shots": 2},
    "search": {"max_steps": 8, "total_train_batch_size": None},
    "granularity": {"max_segment_tokens": 224, "max_passages": None},
    "kate_f2r": {"max_train_samples": None},
}
# Grids of which the paper prints numbers, which stand beside ours.
OF_THE_PAPER = {
    *("d", "fever", "fid_d", "icl", "k", "kate_t1", "kate_t3", "large", "main", "retriever"),
    *("rag_and_lm_bff", "seeds"),
}
COLUMNS = {"fever": "fever", "kate_t1": "sst2", "kate_t3": "sst2"}


def grid_of(name):
    """Return a grid's name, or its path if it is one of the clone's."""
    path = ROOT / "ablations" / f"{name}.yaml"
    return str(path) if path.is_file() else name


GRIDS = sorted(set(re.findall(r"pgra ablate (\w+)", "\n".join(COMMANDS))))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ablations")


def write_data(folder, field, labels):
    """Write labelled texts as the splits of a folder."""
    rows = [{field: f"{SENTENCES[i % 12]} Number {i}.", "label": labels[i % 2]} for i in range(60)]
    folder.mkdir(exist_ok=True)
    for split, part in (("train", rows[:40]), ("validation", rows[40:50]), ("test", rows[50:])):
        write_jsonl(folder / f"{split}.jsonl", part)
    return folder


def data_flags(root, name):
    """Give the data: files in place of the hub's."""
    if name == "kate_t4":
        table = {"table_array": [["Year", "Title"], ["2019", "Laal Ishq"]], "table_page_title": "A"}
        table |= {"highlighted_cell_ids": [[1, 1]], "table_section_title": "", "question": "Where?"}
        rows = [{**table, "answer": text} for text in SENTENCES[:6]]
        (root / "fetaqa").mkdir()
        write_jsonl(root / "fetaqa" / "pool_official_test.jsonl", rows)
        write_jsonl(root / "fetaqa" / "eval_official_dev.jsonl", rows[:2])
        return {"dataset_name": root / "fetaqa"}
    if name == "fever":
        folder = write_data(root / "fever", "claim", ("SUPPORTS", "REFUTES"))
        return {f"{split}_file": folder / f"{split}.jsonl" for split in ("train", "test")}
    folder = write_data(root / "reviews", "text", ("negative", "positive"))
    return {"tasks": COLUMNS.get(name, "mr"), "dataset_name": folder}


@pytest.fixture(scope="module")
def lm(root):
    return build_lm(root / "lm", "gpt2", window=8192)  # its tokens are short


@pytest.fixture(scope="module")
def ran(root, lm, encoder_dir, t5_dirs):
    """Run each grid once, on one folder of artefacts, and give what was said and made."""
    called = {}

    def run(name):
        if name not in called:
            flags = {"encoder": encoder_dir, "lm": lm, "device": "cpu"}  # for the bundled ones
            if name.startswith("kate_"):
                flags |= {"max_train_samples": 12, "max_test_samples": 3}
            else:
                # every word is in ByT5's bytes
                reader = t5_dirs["byt5" if name == "fever" else "flan-t5"]
                flags |= {**SIZES, "model_name_or_path": reader}
            flags |= {**data_flags(root, name), **OWN.get(name, {})}
            flags |= {"artifacts_dir": root / "artifacts", "output_dir": root / name}
            given = [word for k, v in flags.items() if v for word in (f"--{k}", str(v))]
            small = root / f"small_{name}.yaml"
            demo = {"grid": AXES[name]} if name in AXES else {}
            small.write_text(
                yaml.safe_dump({"extends": grid_of(name).removesuffix(".yaml"), "demo": demo})
            )
            words = [str(small), "--demo", "--seeds", "0", *given]
            words += [] if name.startswith("kate_") else ["--drop_readers"]
            with chdir(root):  # where a grid names files itself
                called[name] = call(ablate_main, words)
            check_grid(name, called[name], root / name)
        return root / name

    return run


def check_grid(name, called, folder):
    """Each point was run and measured, and has its row, with the paper's number beside it."""
    assert called.code == 0, called.out + called.err
    told = read_json(folder / "grid.json")
    runs = [folder / place for p in told["points"] for place in p["seeds"].values()]
    assert len(runs) == len(told["points"]) >= 1
    for run in runs:
        assert 0 <= abs(read_json(run / "metrics.json")["value"]) <= 100
    assert "missing" not in called.out
    table = called.out.partition(f"{told['title']}\n\n")[2].partition("\n\n")[0]
    header, _, *rows = table.splitlines()
    assert len(rows) == len(runs), "a row for each point"
    assert header.endswith(" (paper)") == (name in OF_THE_PAPER)
    if name in ("opt_size", "label_consistency"):
        labels = folder.parent / "labels"
        assert measure([str(folder), "--output_dir", str(labels)]) == 0
        lines = (labels / "consistency.csv").read_text().splitlines()
        assert [row["queries"] for row in csv.DictReader(lines)] == ["4", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*list_yamls("ablations")} - {*GRIDS}))
def test_the_runs_of_any_other_grid_are_listed(name, tmp_path):
    for size in ([], ["--demo"]):
        called = call(ablate_main, [name, *size, "--dry-run", "--output_dir", str(tmp_path)])
        assert called.code == 0, called.err
        assert re.search(r"^[1-9]\d* runs, 0 of them finished", called.out, re.M)


def write_stream(path, family):
    """Write a stream of a family, each question asked of two words."""
    if family.is_of_answers:
        rows = [{"question": text, "answers": ["a sea"]} for text in SENTENCES[:4]]
        return write_jsonl(path, rows)
    rows = []
    for kind, form in list(family.answers.items())[:2]:
        for word in ("fast", "cold"):
            told = {"type": kind, "word": word, "question": f"{kind} of < {word} > ?"}
            answer = form.format(word=word, answer="x")
            rows.append({**told, "feedback": f"I mean {kind}", "expected_answer": answer})
    return write_jsonl(path, rows)


def run_stream(words, root, lm, encoder_dir):
    family = load_family(words[words.index("--family") + 1])
    path = root / words[words.index("--stream") + 1]
    write_stream(path, family)
    small = {"facebook/opt-13b": lm, "sentence-transformers/all-MiniLM-L6-v2": encoder_dir}
    words = [str(small.get(word, word)) for word in words]
    flags = ["--max_new_tokens", "2", "--max_prompt_tokens", "8000", "--device", "cpu"]
    flags += ["--artifacts_dir", str(root / "artifacts")]
    if "--lookup" in words:
        flags += ["--encoder", str(encoder_dir)]
    flags += ["--clarification_probabilities", "1"]
    called = call(main, ["memory", *words[:2], *flags, *words[2:]])  # the last of two counts
    assert called.code == 0, called.err
    assert "| MEM-PROMPT, p = 1" in called.out
    assert ("nearest in the memory" in called.out) == ("| NO-MEM" in called.out)


def run_report(words, root, ran):
    """Lay out samples of runs, whose folders must be those of the grid at full size."""
    paths = []
    for word in words:
        found = re.fullmatch(r"runs/ablate-(\w+)(?:/(\w+))?/([^/]+)/seed-0", word)
        if not found:
            paths.append(word)
            continue
        name, task, point = found.groups()
        grid = read_grid(grid_of(name))
        assert task in (grid.tasks if len(grid.tasks) > 1 else [None])
        assert point in [cell.folder for cell in grid.cells]
        paths.append(str(ran(name) / re.sub("KATE-.*", "KATE-MiniLM", point) / "seed-0"))
    called = call(report_main, paths)
    assert called.code == 0, called.err
    assert "  right: " in called.out


def make_kate_table3(root):
    """Train its encoder for a step, on files in place of the hub's data."""
    encoder = build_encoder(root / "roberta", "roberta")
    rows = [{"sentence": text, "text": text, "label": i % 2} for i, text in enumerate(SENTENCES)]
    file = str(write_jsonl(root / "labelled.jsonl", rows))
    flags = ["--model", str(encoder), "--sst2", file, "--imdb", file, "--max_steps", "1"]
    with chdir(root):
        assert importlib.import_module("kate_table3").main(flags) == 0
    assert (root / "roberta-large-sst2" / "model.safetensors").is_file()
    first = (root / "imdb_test.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {"sentence": SENTENCES[0], "label": "negative"}


def test_the_page_has_commands_of_all_kinds():
    kinds = {tuple(shlex.split(command)[:2]) for command in COMMANDS}
    known = [("pgra", word) for word in ("ablate", "memory", "report", "task")]
    assert kinds == {*known, ("python", "examples/kate_table3.py")}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command, ran, root, lm, encoder_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(root)
    for part in command.split(" && "):
        program, first, *words = shlex.split(part)
        if program == "python":
            make_kate_table3(root)
        elif first == "ablate":
            name, *tasks = Path(words[0]).stem, *words[2:]
            assert {*tasks} <= {*read_grid(grid_of(name)).tasks}
            ran(name)
        elif first == "memory":
            run_stream(words, root, lm, encoder_dir)
        elif first == "report":
            run_report(words, root, ran)
        else:
            assert words[-2:] == ["--dataset_name", "own"]  # the hub's, which no test asks
            called = call(main, [first, *words[:-2]])
            assert called.code == 0, called.err
            assert called.out.count(": valid") == len(words) - 2
