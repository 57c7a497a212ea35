import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_training import make_arguments, run_files, train
from transformers import AutoModelForSeq2SeqLM

from pgra.errors import ArtifactError
from pgra.reader.resume import last_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(t5_dir, tmp_path_factory):
    """A finished run with two checkpoints: the better, and the last."""
    folder = tmp_path_factory.mktemp("run")
    values = iter([0.9, 0.5])
    reader, _ = train(
        t5_dir,
        make_arguments(folder),
        measure=lambda labels, predictions: {"accuracy": next(values)},
    )
    for kept in ("checkpoint-3", "reader"):
        weights = AutoModelForSeq2SeqLM.from_pretrained(folder / kept).state_dict()
        assert all(torch.equal(weights[n], w) for n, w in reader.model.state_dict().items())
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


NAMES = ["training.safetensors", "model.safetensors", "state.json", "checksums.json"]


@given(name=st.sampled_from(NAMES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 6))
def test_no_flipped_bit_of_a_checkpoint_is_gone_on_from(run, name, place, bit):
    path = run / "checkpoint-6" / name
    assert last_checkpoint(run) == path.parent  # the control
    good = path.read_bytes()
    bad = bytearray(good)
    bad[int(place * len(bad))] ^= 1 << bit
    try:
        path.write_bytes(bad)
        assert last_checkpoint(run) == run / "checkpoint-3"
    finally:
        path.write_bytes(good)


def test_a_run_whose_best_checkpoint_is_gone_is_not_ended_with_another(copy, t5_dir, run):
    # The folder was moved: the best is found beside the last.
    _, progress = train(t5_dir, make_arguments(copy))
    assert (progress.best_step, progress.best_value) == (3, 0.9)
    assert run_files(copy) == run_files(run)
    shutil.rmtree(copy / "checkpoint-3")
    with pytest.raises(ArtifactError, match="checkpoint-3"):
        train(t5_dir, make_arguments(copy))
