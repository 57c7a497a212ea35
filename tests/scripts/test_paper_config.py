"""The paper's own run, from its YAML: what it says, and every stage built from it, small."""

import pytest
from conftest import SENTENCES
from method_runs import parse
from scripted import call

from index_build.__main__ import main as index_main
from pgra.config import config_root

PAPER = config_root() / "experiments" / "paper.yaml"


def test_the_yaml_gives_the_papers_constants():
    run = parse("--config", str(PAPER))
    assert run.corpus.corpus.endswith("datasets-for-simcse/wiki1m_for_simcse.txt")
    constants = {
        "method": "pgra",
        "retriever": "dense",
        "encoder": "google-bert/bert-base-uncased",
        "num_candidates": 150,
        "normalize": False,
        "reranker": "prompted",
        "lm": "facebook/opt-13b",
        "lm_dtype": "float16",
        "similarity": "dot",
        "exemplars": "random",
        "num_exemplars": 8,
        "num_evidence": 16,
        "model_name_or_path": "google-t5/t5-base",
        "learning_rate": 8e-5,
        "total_train_batch_size": 8,
        "max_steps": 5000,
    }
    given = {name: value for part in run.sections.values() for name, value in vars(part).items()}
    assert given.items() >= constants.items()


@pytest.mark.slow
def test_every_stage_is_built_from_it(new_bench, lm_dirs):
    """With models of the same architectures, a dozen sentences, and only sizes and places."""
    new_bench.corpus.write_text("\n".join([*SENTENCES, SENTENCES[0]]) + "\n")
    flags = {name: new_bench.flags[name] for name in ("corpus", "encoder", "artifacts_dir")}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    built = call(index_main, ["--config", str(PAPER), "--device", "cpu", *words])
    assert "13 passages" in built.out  # drop_duplicates: false
    of_the_paper = dict.fromkeys(("per_device_train_batch_size", "seed"))
    small = {"num_evidence": 3, "num_exemplars": 4, "lm": lm_dirs["opt"], **of_the_paper}
    new_bench.make("run", config=PAPER, **small)
    assert new_bench.metrics("run")["n"] == 12
    assert [len(line["evidence"]) for line in new_bench.predictions("run")] == [3] * 12
    # One index served both programs, and the states are a float16 LM's.
    assert len(list((new_bench.artifacts / "indexes").iterdir())) == 1
    for folder in (new_bench.artifacts / "banks").iterdir():
        assert '"float16"' in (folder / "manifest.json").read_text()
