"""Lists the models that come inside packages: `pgra models`."""

from collections.abc import Sequence

from pgra.commands.listing import Entry, package_state, parse_help_only, show_list
from pgra.lm.bundled import BUNDLED_MODELS

ABOUT = "List the models that come inside packages, and say what else may be named."
EXAMPLE = """example:
  pgra models
  pgra search "A warm and funny film." --corpus bundled:wikipedia-19k \\
      --encoder bundled:minilm-l6
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Show each bundled model with its role, licence and note."""
    parse_help_only(argv, prog="pgra models", about=ABOUT, example=EXAMPLE)
    entries = [
        Entry(
            f"bundled:{model.name}",
            f"{model.role}: {model.about}",
            (
                package_state(model.files[0].package, model.package),
                f"licence: {model.licence}",
                f"note: {model.note}",
            ),
        )
        for model in BUNDLED_MODELS.values()
    ]
    show_list(
        "models inside packages, for --encoder, --lm and --model_name_or_path:",
        entries,
        "Any hub id or local folder with safetensors works in their place: a BERT or RoBERTa as "
        "encoder, any causal LM (OPT, GPT-2, Llama, Qwen, ...), any T5 as reader.",
    )
    return 0
