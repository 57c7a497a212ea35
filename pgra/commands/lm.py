"""`pgra lm cut`: an LM's folder without its later layers, for engines that give the last state."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pgra.commands.common import parse, quiet_libraries, say
from pgra.config import Arguments, arg
from pgra.errors import ConfigError


@dataclass(kw_only=True)
class CutArguments(Arguments):
    """What is cut, where."""

    lm: str = arg("", "Causal LM: hub id, folder or bundled:NAME.", must_be_given=True)
    lm_layer: str = arg("", "The last layer that stays, as of --lm_layer.", must_be_given=True)
    output_dir: str = arg("", "The new folder.", must_be_given=True)


def main(words: Sequence[str]) -> int:
    """Write an LM without its later layers, so that an engine gives the states of a depth.

    Example:
      pgra lm cut bundled:smollm2-135m 0.77 smollm2-cut

    The three may also be given by their names. The folder is a plain one of transformers; its head
    reads the new last layer, after the LM's own final norm.
    """
    words = words[1:] if words[:1] == ["cut"] else words
    if not any(word.startswith("--") for word in words):
        names = ("--lm", "--lm_layer", "--output_dir")
        words = list(chain.from_iterable(zip(names, words, strict=False)))
    (args,) = parse(main, [CutArguments], words, "pgra lm cut")
    folder = Path(args.output_dir)
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a new folder")
    quiet_libraries()
    from pgra.artifacts import write_aside
    from pgra.lm.causal_lm import CausalLM

    lm = CausalLM(args.lm, layer=args.lm_layer, device="cpu")
    with write_aside(folder) as aside:
        lm.whole.save_pretrained(aside)
        lm.tokenizer.save_pretrained(aside)
    say(f"{folder}: {lm.layer or 'all'} layers of {args.lm}")
    return 0
