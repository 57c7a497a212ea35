"""The paper's own run, as its YAML says it; `test_ablations.py` makes the grids, small."""

from method_runs import parse

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
