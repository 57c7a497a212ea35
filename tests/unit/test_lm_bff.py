import json
import signal
from dataclasses import replace

import pytest
from small_training import at_batch, make_arguments, run_files, signal_self

from pgra import Reader
from pgra.commands.common import parse_series
from pgra.config import config_root
from pgra.errors import ArtifactError, ConfigError, DataError, Stopped
from pgra.methods.lm_bff import read_shots, run
from pgra.runs import evaluate_run, run_system

FEW = {"num_shots": 4, "exemplar_sets": 2, "max_steps": 4, "eval_steps": 2}


@pytest.fixture
def few(args):
    return replace(args, runtime=replace(args.runtime, system="lm-bff"))


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_a_run_is_trained_on_few_shots_measured_and_taken_up(few, tmp_path):
    done = run_system(few, make_arguments(tmp_path / "run", **FEW))
    assert not done.reused
    assert done.metrics["system"] == "lm-bff"
    assert done.metrics["n"] == 12
    identity = json.loads((done.folder / "run.json").read_text())
    assert identity["method"] == "lm-bff"
    assert identity["demonstrations"]["sets"] == 2
    lines = (done.folder / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["evidence"] for line in lines] == [[]] * 12
    again = run_system(few, make_arguments(tmp_path / "run", **FEW))
    assert again.reused
    with pytest.raises(ArtifactError, match="choose another --output_dir"):
        run(few, make_arguments(tmp_path / "run", **{**FEW, "exemplar_sets": 3}))
    with pytest.raises(ConfigError, match="--system lm-bff, which makes its inputs"):
        Reader.load(done.folder)
    with pytest.raises(ConfigError, match="--system lm-bff, which makes its inputs"):
        evaluate_run(done.folder)


def test_a_stopped_run_goes_on_to_the_same_weights(few, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(few, make_arguments(whole, **FEW))
    with at_batch(3, signal_self(signal.SIGTERM)), pytest.raises(Stopped):
        run(few, make_arguments(stopped, **FEW))
    assert not (stopped / "reader").exists()
    run(few, make_arguments(stopped, **FEW))
    assert run_files(stopped) == run_files(whole)


def test_the_seed_gives_the_split(few, tmp_path):
    def split(seed):
        found = read_shots(few, make_arguments(tmp_path / "run", seed=seed, **FEW))
        return [example.id for example in found.splits.train + found.splits.dev]

    assert len(set(split(13))) == 16
    assert split(13) == split(13)
    assert split(13) != split(21)


def test_what_it_cannot_do_is_refused(few, tmp_path):
    arguments = make_arguments(tmp_path / "run", **FEW)
    official = replace(few, reader=replace(few.reader, decode="official"))
    with pytest.raises(ConfigError, match="decode 'official' writes one token, and lm-bff"):
        run(official, arguments)
    with pytest.raises(DataError, match="label 'negative' has 20 training examples"):
        run(few, make_arguments(tmp_path / "run", **{**FEW, "num_shots": 11}))
    with pytest.raises(ConfigError, match="exemplar_share is 0: it must be above 0 and at most 1"):
        make_arguments(tmp_path / "run", **FEW, exemplar_share=0)
    assert not (tmp_path / "run").exists()


def test_its_experiment_holds_the_papers_settings():
    words = ["--config", str(config_root() / "experiments/lm-bff.yaml"), "--task", "sst2"]
    words += ["--seeds", *map(str, (13, 21, 42, 87, 100)), "--device", "cpu"]
    args, series, training, _ = parse_series(words, prog="test", description="", epilog="")
    assert args.system == "lm-bff"
    assert (args.rerank.num_evidence, args.reader.max_segment_tokens) == (0, 128)
    assert (training.num_shots, training.exemplar_sets, training.exemplar_share) == (16, 16, 0.5)
    assert training.max_steps == 1000
    assert series.seed_list() == [13, 21, 42, 87, 100]
