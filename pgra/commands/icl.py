"""Decides a task's queries by a frozen LM and labelled examples in its prompt: `pgra icl`."""

from collections.abc import Sequence

from pgra.commands.common import quiet_libraries, say, show_metrics, show_summary
from pgra.config import DataArguments, SeriesArguments, parse_arguments

EXAMPLE = """examples:
  pgra icl --task sst2 --exemplars knn --num_exemplars 8 --lm bundled:smollm2-135m \\
      --encoder bundled:minilm-l6
  pgra icl --task sst2 --exemplars random --redraw --seeds 0 1 2 3 4
  pgra icl --task sst2 --exemplars knn --farthest --likeness euclidean --pooling cls \\
      --encoder FacebookAI/roberta-large
  pgra icl --task sst2 --query_dataset_name imdb-folder --num_exemplars 3 --prompt_format kate
  pgra icl --task sst2 --encoder prompted --calibrate
  pgra icl --task sst2 --decide_by vote --num_exemplars 5
  pgra icl --task sst2 --lm openai:MODEL --base_url http://localhost:8000/v1
  pgra icl --task sst2 --memory memory.sqlite --memory_lookup encoder --memory_threshold 0.8
  accelerate launch --num_processes 8 -m pgra icl --task sst2 --lm facebook/opt-13b
  pgra report runs/ --baseline icl-random

Vectors, neighbors and answers are kept in --artifacts_dir: what was stopped goes on, and another
run asks only what is new.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Choose exemplars, ask, measure and show."""
    from pgra.exemplars import SelectionArguments
    from pgra.lm.base import CompleterArguments
    from pgra.memory.labels import PromptMemoryArguments
    from pgra.methods.kate_arguments import IclArguments

    data, completer, selection, icl, memory = parse_arguments(
        [
            DataArguments,
            CompleterArguments,
            SelectionArguments,
            IclArguments,
            PromptMemoryArguments,
        ],
        argv,
        prog="pgra icl",
        description="Let a frozen LM decide queries behind labelled examples (KATE).",
        epilog=EXAMPLE,
    )
    seeds = SeriesArguments(seeds=icl.seeds).seed_list()
    memory.check_named()
    quiet_libraries()
    from pgra.core import join_context
    from pgra.methods.kate import run_icl, run_icl_seeds
    from pgra.methods.kate_inputs import IclRun

    context = join_context(icl.device)
    run = IclRun(data=data, completer=completer, selection=selection, icl=icl, memory=memory)
    if seeds:
        shown = show_summary(run_icl_seeds(run, seeds, context))
    else:
        shown = show_metrics(run_icl(run, context=context))
    if context.worker.is_main:
        say(shown)
    return 0
