import pytest
from transformers import TrainingArguments

from pgra.config import parse_arguments
from pgra.errors import ConfigError
from pgra.reader import arguments as trackers
from pgra.reader.arguments import ReaderTrainingArguments, check_trackers


def test_nothing_is_reported_unless_asked_for():
    assert ReaderTrainingArguments(use_cpu=True).report_to == []
    assert ReaderTrainingArguments(use_cpu=True, report_to="none").report_to == []
    assert TrainingArguments(use_cpu=True).report_to == []  # the Trainer's default is ours


def test_several_trackers_are_read_from_the_command_line():
    (training,) = parse_arguments(
        [ReaderTrainingArguments],
        ["--report_to", "tensorboard", "--use_cpu"],
        prog="train.py",
        description="",
    )
    assert training.report_to == ["tensorboard"]


def test_names_may_stand_in_one_word(monkeypatch):
    monkeypatch.setattr(
        "transformers.integrations.get_available_reporting_integrations",
        lambda: ["tensorboard", "wandb"],
    )
    assert check_trackers("tensorboard,wandb") == ["tensorboard", "wandb"]
    assert check_trackers(["tensorboard", "wandb"]) == ["tensorboard", "wandb"]
    assert check_trackers("all") == ["tensorboard", "wandb"]


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord'. Did you mean 'tensorb"):
        check_trackers(["tensorbord"])
    with pytest.raises(ConfigError, match="unknown tracker 'none'|unknown tracker 'all'"):
        check_trackers(["tensorboard", "all"])


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_missing_package_is_told_with_its_name(monkeypatch, name, package):
    monkeypatch.setattr(
        "transformers.integrations.get_available_reporting_integrations", lambda: []
    )
    with pytest.raises(ConfigError, match=f"report_to {name} needs .*pip install {package}, or"):
        ReaderTrainingArguments(use_cpu=True, report_to=[name])


def test_wandb_is_closed_after_a_training_and_nothing_else_is_touched(monkeypatch):
    closed = []

    class Wandb:
        @staticmethod
        def finish():
            closed.append("wandb")

    monkeypatch.setitem(trackers.sys.modules, "wandb", Wandb)
    trackers.finish_trackers(["tensorboard"])
    assert closed == []
    trackers.finish_trackers(["wandb"])
    assert closed == ["wandb"]
