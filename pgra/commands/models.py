"""Lists the models that come inside packages: `pgra models`."""

from collections.abc import Sequence

from pgra.commands.listing import bundled_entry, parse_help_only, show_list
from pgra.data.bundled import BUNDLED_MODELS

ABOUT = "List the models that come inside packages, and say what else may be named."
EXAMPLE = """example:
  pgra models
  pgra search "A warm and funny film." --corpus bundled:wikipedia-19k \\
      --encoder bundled:minilm-l6
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Show each bundled model with its role, licence and note."""
    parse_help_only(argv, prog="pgra models", about=ABOUT, example=EXAMPLE)
    show_list(
        "models inside packages, for --encoder, --lm and --model_name_or_path:",
        [bundled_entry(model) for model in BUNDLED_MODELS.values()],
        "Any hub id or local folder with safetensors works in their place: a BERT or RoBERTa as "
        "encoder, any causal LM (OPT, GPT-2, Llama, Qwen, ...), any T5 as reader.",
    )
    return 0
