"""A GPU that fails, wherever it does: one line, the way out, exit code 2, and what is done stays.

Torch's own errors are raised from within the models, as a GPU would have them raised.
"""

import pytest
import torch
from conftest import write_jsonl
from scripted import Bench, call, contents, half_written, review_rows
from torch.nn.modules.module import register_module_forward_pre_hook

from pgra.cli import dispatch

MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee more")
FAULTS = {
    "memory": MEMORY,
    "lost": torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with ..."),
    "library": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
}
OURS = RuntimeError("shapes do not match")


@pytest.fixture(scope="module")
def there(lm_dirs, encoder_dir, t5_dir, tmp_path_factory):
    """Finished runs, and files that no run has read yet."""
    root = tmp_path_factory.mktemp("faults")
    there = Bench(root, lm_dirs["opt"], encoder_dir, t5_dir)
    for flag in ("eval_strategy", "save_strategy"):
        there.flags[flag] = "no"
    there.flags["load_best_model_at_end"] = "false"
    there.make("pgra")
    there.make("plain", method="plain", corpus=None, encoder=None, lm=None, **NO_EVIDENCE)
    write_jsonl(root / "new.jsonl", review_rows(8, start=60))
    return there


NO_EVIDENCE = dict.fromkeys(("num_candidates", "num_evidence", "num_exemplars"))


def words_of(there, *names, **more):
    flags = {**{name: there.flags[name] for name in names}, **more}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


FIND = ("task", "train_file", "test_file", "encoder", "lm", "device", "num_exemplars")
SEARCH = ("corpus", "encoder", "device")
# Which model fails, and the command in which it does.
PLACES = {
    "calibration": ("T5", lambda b: ["train", *b.argv("new", seed=2)]),
    "test decisions": ("T5", lambda b: ["evaluate", "--run", str(b.run("pgra"))]),
    "predict": ("T5", lambda b: ["predict", "A film.", "--run", str(b.run("pgra"))]),
    "the LM of predict": ("OPT", lambda b: ["predict", "A sea film.", "--run", str(b.run("pgra"))]),
    "the LM's reading": (
        "OPT",
        lambda b: [
            *("rerank", *words_of(b, *FIND, "corpus", "num_candidates", "num_evidence")),
            *("--artifacts_dir", str(b.root / "other")),
        ],
    ),
    "the LM's answers": (
        "OPT",
        lambda b: ["icl", *words_of(b, *FIND, "artifacts_dir", output_dir=b.run("icl"))],
    ),
    "the encoder": (
        "Bert",
        lambda b: ["index", *words_of(b, *SEARCH), "--artifacts_dir", str(b.root / "index")],
    ),
    "labels of evidence": (
        "T5",
        lambda b: [
            *("consistency", "--runs", str(b.run("pgra")), "--labeler", str(b.run("plain"))),
            *("--output_dir", str(b.root / "consistency"), "--device", "cpu"),
        ],
    ),
}


class Failing:
    """Models of a kind fail, wherever they do not train."""

    def __init__(self, kind, error):
        self.kind, self.error, self.num_failed = kind, error, 0

    def __call__(self, module, _):
        if type(module).__name__.startswith(self.kind) and not module.training:
            self.num_failed += 1
            raise self.error

    def __enter__(self):
        self._hook = register_module_forward_pre_hook(self)
        return self

    def __exit__(self, *_):
        self._hook.remove()


@pytest.mark.parametrize("place", PLACES)
def test_a_gpu_that_fails_ends_a_command_in_one_line(there, place, monkeypatch):
    monkeypatch.chdir(there.root)
    kind, command = PLACES[place]
    words = command(there)
    for name, error in FAULTS.items():
        with Failing(kind, error) as failing:
            told = call(dispatch, words).error
        assert failing.num_failed, told  # the control: it does run there
        assert str(error).partition("\n")[0].rstrip(".") in told or name == "memory", told
        wanted = "memory" if name == "memory" else "the same command goes on"
        assert wanted in told
        assert half_written(there.root) == []
    kept = contents(there.run("pgra"))
    with Failing(kind, OURS), pytest.raises(RuntimeError, match="shapes do not match"):
        call(dispatch, words)  # our own mistake stays one
    assert call(dispatch, words).code == 0  # the same command goes on
    assert kept.keys() <= contents(there.run("pgra")).keys()
