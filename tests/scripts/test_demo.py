"""The demo, in small, on the real models and sentences."""

import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from pgra.commands.demo import SYSTEMS, main
from pgra.models.causal_lm import CausalLM
from pgra.models.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

pytestmark = pytest.mark.slow
SMALL = [
    *("--max_passages", "100", "--num_candidates", "8", "--max_train_samples", "16"),
    *("--max_dev_samples", "2", "--max_test_samples", "12", "--max_steps", "1"),
    *("--artifacts_dir", "artifacts", "--output_dir", "runs/demo"),
]


def test_the_demo_compares_three_readers_and_is_reused(tmp_path, monkeypatch, capsys, two_threads):
    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 0
    shown = capsys.readouterr().out
    for name in SYSTEMS:
        assert f"| {name}" in shown
    assert "95 % interval" in shown
    assert "query: " in shown
    report = (tmp_path / "runs/demo/report.md").read_text()
    assert "whose training split is not unseen data" in report
    assert (tmp_path / "runs/demo/results.png").read_bytes().startswith(b"\x89PNG")
    folders = {name: tmp_path / "runs/demo" / name for name in ("t5", "fid", "pgra")}
    lines = {
        name: [json.loads(t) for t in (folder / "predictions.jsonl").read_text().splitlines()]
        for name, folder in folders.items()
    }
    assert all(line["evidence"] == [] for line in lines["t5"])
    assert all(
        [seen["stage1_rank"] for seen in line["evidence"]] == [1, 2, 3, 4] for line in lines["fid"]
    )
    chosen = [[seen["stage1_rank"] for seen in line["evidence"]] for line in lines["pgra"]]
    assert any(ranks != [1, 2, 3, 4] for ranks in chosen)
    same = {tuple(line["id"] for line in found) for found in lines.values()}
    assert len(same) == 1  # the same test sentences for all

    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.npy")}
    assert main(SMALL) == 0
    assert "was there already and was reused" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.npy")} == before


def test_the_real_lms_states_are_those_of_whole_prompts(two_threads):
    prefix = (
        "Follow the demonstrations:\nIs this good?\nA fine film.\nThe answer is yes\n\n"
        "Is this good?\nA dull one.\nThe answer is no"
    )
    prompt = FewShotPrompt(PromptTemplate("Is this good?\n{text}"), prefix)
    lm = CausalLM.from_name("bundled:smollm2-135m", device="cpu")
    texts = ["A warm portrait of a family.", "1925", "He left; nobody knew why - not even she."]
    encoder = PromptedEncoder(lm, prompt)
    states = encoder.encode(texts)
    assert encoder.way == "packed"
    tokenizer = AutoTokenizer.from_pretrained(lm.source.path)
    model = AutoModel.from_pretrained(lm.source.path, dtype=torch.float32).eval()
    for state, text in zip(states, texts, strict=True):
        whole = f"{prefix}\n\nIs this good?\n{text}\nThe answer is"
        ids = tokenizer(whole, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            truth = model(input_ids=ids).last_hidden_state[0, -1]
        assert float((state - truth).norm() / truth.norm()) < 1e-4
