"""Compares what each way finds, without training a reader: `ablations/evidence.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import parse_stages, quiet_libraries, say
from pgra.config import Arguments, PgraArguments, ReaderArguments, arg
from pgra.errors import ConfigError

EXAMPLE = """example:
  python train.py --task sst2 --method plain --output_dir runs/plain
  python ablations/evidence.py --task sst2 --labeler runs/plain --output_dir runs/evidence \\
      --bank full --num_evidence 16 --depths 2 16

Evidence by chance, of the first stage, and by each similarity of the LM's states; with --bank full
also the best of the whole corpus. The plain reader gives each text its pseudo-label; evidence is
consistent with a query whose label that is.
"""


@dataclass(kw_only=True)
class EvidenceArguments(Arguments):
    """Who labels the evidence, and how much of it is looked at."""

    labeler: str | None = arg(None, "A finished run of --num_evidence 0 on this task.")
    output_dir: str | None = arg(None, "Where labels and tables go.")
    depths: list[int] = arg(
        [], "Look at each query's best so many evidence; default: --num_evidence."
    )
    centre: bool = arg(
        True,
        "Centre the labeler at its medians over 1,000 passages of the corpus, so that it does not "
        "call nearly all of it one label; --no_centre: the paper's labels.",
    )

    def check(self) -> None:
        """Refuse to do nothing."""
        if self.labeler is None:
            raise ConfigError("--labeler is missing: give a finished run of --num_evidence 0")
        if self.output_dir is None:
            raise ConfigError("--output_dir is missing: say where labels and tables go")


def main(argv: Sequence[str] | None = None) -> int:
    """Find, label, measure and show."""
    from pgra.core import join_context

    sections, (how,) = parse_stages(
        argv,
        [EvidenceArguments],
        without=["reader"],
        prog="ablations/evidence.py",
        description="Measure how often the evidence of each way has the label of its query.",
        epilog=EXAMPLE,
    )
    args = PgraArguments(**sections, reader=ReaderArguments())
    quiet_libraries()
    from pgra.experiments.consistency import compare_evidence

    context = join_context(args.runtime.device)
    study = compare_evidence(
        args,
        Path(how.labeler),
        Path(how.output_dir),
        depths=how.depths,
        centre=how.centre,
        context=context,
    )
    say(study.tables[0].to_text())
    return 0
