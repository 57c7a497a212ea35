"""What a user can get wrong: one line that names it, exit code 2, and nothing half-written."""

import re

import pytest
from conftest import contents

from pgra.cli import main

TASK = """
labels: [negative, positive]
prompt: "{text}"
reader_template: "{text} <extra_id_0>"
verbalizer: {negative: terrible, positive: great}
"""


ONE = "--task sst2 --train_file one.jsonl --output_dir out"
SEARCH = "search a --task sst2 --corpus corpus.txt"
LIKELIHOOD = "search a --task sst2 --reranker likelihood --likelihood_template"
# One of each kind of mistake: the words of a command, and the value that its line holds.
KINDS = {
    "unknown command": ("trian", "trian"),
    "unknown argument": ("train --lerning_rate 1", "--lerning_rate"),
    "missing argument": ("train", "--task"),
    "unknown name": ("train --task sst3", "sst3"),
    "unknown class": ("search --task sst2 --reranker nope:Reranker", "nope:Reranker"),
    "class of another kind": (f"{SEARCH} --reranker pgra.rerank.bank:Bank", "rerank.bank:Bank"),
    "option of another class": (f"{SEARCH} --cross_encoder x", "--cross_encoder"),
    "wrong type": ("search a --corpus corpus.txt --num_candidates few", "few"),
    "out of range": ("search a --corpus corpus.txt --num_candidates 0", "num_candidates"),
    "not finite": ("train --task sst2 --weight_decay nan", "weight_decay is nan"),
    "empty path": ("index --corpus corpus.txt --artifacts_dir=", "artifacts_dir is empty"),
    "contradiction": ("train --task sst2 --method plain --num_evidence 8", "num_evidence is 8"),
    "missing file": ("search a --corpus corpsu.txt", "corpsu.txt"),
    "empty corpus": ("search a --corpus empty.txt", "empty.txt"),
    "broken YAML": ("train --task sst2 --config broken.yaml", "broken.yaml"),
    "unknown key of a YAML": ("train --task task.yaml", "lables"),
    "duplicate key of a YAML": ("train --task twice.yaml", "duplicate key 'labels'"),
    "duplicate key of JSON": ("search a --corpus twice.jsonl", "'text'"),
    "unknown label": ("icl --train_file label.jsonl", "postive"),
    "missing column": ("icl --train_file column.csv", "'text'"),
    "ragged table": ("icl --train_file ragged.tsv", "ragged.tsv"),
    "damaged table": ("icl --train_file damaged.parquet", "damaged.parquet"),
    "damaged memory": ("memory list --memory damaged.sqlite", "damaged.sqlite"),
    "no finished run": ("evaluate --run folder", "folder"),
    "no run to ask": ("predict x --run runs/none", "runs/none"),
    "no run to push": ("push --run runs/none --hub_model_id me/model", "runs/none"),
    "nothing to report": ("report runs/none", "runs/none"),
    "nothing to verify": ("verify folder", "folder"),
    "no memory": ("memory update 1 x", "memory.sqlite"),
    "no entry of a grid": ("ablate none.yaml", "none.yaml"),
    "unknown family": ("memory search a --family lexcal", "lexcal"),
    "unknown profile": ("train --task sst2 --profile papre", "papre"),
    "more evidence than candidates": (
        "train --task sst2 --num_candidates 6 --num_evidence 7",
        "(7)",
    ),
    "worth of another method": ("worth --task sst2 --method fid", "fid"),
    "nothing to serve": ("serve", "--lm"),
    "no reranker for agents": ("mcp --task sst2", "sst2"),
    "no index": ("search a --index_dir folder", "folder"),
    "repeated seed": ("train --task sst2 --seeds 1 2 1", "seeds 1 2 1"),
    "evidence of no text": ("train --task sst2 --method fid --num_evidence 0", "'fid' reads"),
    "template without a place": (f"{LIKELIHOOD} {{passage}}", "likelihood_template is '{passage}'"),
    "template that goes on": (f"{LIKELIHOOD} {{query}}{{passage}}", "end it with {query}"),
    "causal template": ("search a --reranker causal --causal_template {query}", "is '{query}'"),
    "LM without states": ("train --method head --lm openai:toy", "openai:toy"),
    "label of no example": (f"train --model_name_or_path T5 --method plain {ONE}", "'positive'"),
    "window too small": ("train --method head --lm LM --max_prompt_tokens 8", "may read 8"),
}
FILES = {
    "corpus.txt": "one film\nanother film\n",
    "empty.txt": "",
    "broken.yaml": "a: [1",
    "task.yaml": TASK.replace("labels", "lables"),
    "twice.yaml": TASK + "labels: [bad, good]\n",
    "twice.jsonl": '{"text": "a", "text": "b"}\n',
    "label.jsonl": '{"text": "a", "label": "postive"}\n',
    "one.jsonl": "".join(f'{{"text": "{n}", "label": "negative"}}\n' for n in range(19)),
    "column.csv": "words,label\na,positive\n",
    "ragged.tsv": "text\tlabel\na\tpositive\t1\n",
    "damaged.parquet": "PAR1 and no more",
    "damaged.sqlite": "no memory " * 100,
}
ICL = "--task sst2 --test_file label.jsonl --decide_by vote --encoder bm25 --output_dir out"
HEAD = f"--num_exemplars 0 {ONE}"


@pytest.fixture
def mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_mistake_is_one_line_with_its_value(kind, mistakes, lm_dirs, t5_dir, capfd):
    line, value = KINDS[kind]
    line += f" {ICL}" if line.startswith("icl") else ""
    line += f" {HEAD}" if "--method head" in line else ""
    models = {"LM": lm_dirs["opt"], "T5": t5_dir}
    assert main([str(models.get(word, word)) for word in line.split()]) == 2
    told = capfd.readouterr()
    assert told.out == ""
    *_, error = told.err.splitlines()
    assert error.startswith("pgra: error: ")
    assert value in error
    assert "Traceback" not in told.err
    assert set(contents(mistakes)) == set(FILES)


@pytest.mark.slow
def test_a_run_is_not_measured_on_inputs_that_changed_since(new_bench):
    task = new_bench.root / "mine.yaml"
    task.write_text(TASK)
    assert new_bench.train("x", task=task).code == 0
    assert new_bench.evaluate("x").code == 0
    before = new_bench.predictions("x")
    lines = new_bench.train_file.read_text().splitlines(keepends=True)
    changes = {
        "corpus": (
            new_bench.corpus,
            new_bench.corpus.read_text() + "One more sentence stands here now.\n",
        ),
        "dev|train|reranker": (new_bench.train_file, "".join(reversed(lines))),
        "reranker": (task, task.read_text().replace("{text}", "Is it good? {text}", 1)),
    }
    for name, (path, changed) in changes.items():
        kept = path.read_text()
        path.write_text(changed)
        error = new_bench.evaluate("x").error
        assert re.search(f"was made with ({name}) .* changed since", error), error
        assert new_bench.predictions("x") == before
        path.write_text(kept)
    assert new_bench.evaluate("x").code == 0  # the control: as they were
