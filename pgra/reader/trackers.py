"""Where the Trainer's log goes besides the terminal: TensorBoard, W&B, Trackio and others."""

import sys
from collections.abc import Sequence

from pgra.errors import ConfigError, unknown_name

_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet-ml", "tensorboard": "tensorboardX"}
"""The package to install, where it is not named like the tracker."""
_UNSEEN = ("flyte", "kubeflow")  # not among what transformers can tell the presence of


def check_trackers(report_to: str | Sequence[str] | None) -> list[str]:
    """Read the trackers to report to, and refuse what could not be reported to.

    Args:
        report_to: Names, one or several in a word; "none" and "all" (that are installed) stand
            alone.

    Returns:
        The names; empty for none.

    Raises:
        ConfigError: If one is unknown, or its package is not installed.
    """
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    given = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for word in given for name in word.split(",") if name]
    if names in ([], ["none"]):
        return []
    available = get_available_reporting_integrations()
    if names == ["all"]:
        return list(available)
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(unknown_name("tracker", name, [*INTEGRATION_TO_CALLBACK, "none"]))
        if name not in (*available, *_UNSEEN):
            package = _PACKAGES.get(name, name)
            raise ConfigError(
                f"report_to {name} needs a package that is not installed: pip install {package}, "
                "or leave it out"
            )
    return names


def finish_trackers(names: Sequence[str] | None) -> None:
    """Close what a training leaves open, so that the next one in this process is one of its own."""
    if "wandb" in (names or ()) and "wandb" in sys.modules:
        sys.modules["wandb"].finish()
