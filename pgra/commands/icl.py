"""`pgra icl`: a frozen LM decides after labelled examples."""

from collections.abc import Sequence

from pgra.commands.train import run_method


def main(argv: Sequence[str]) -> int:
    r"""Let a frozen LM decide queries after labelled examples (KATE).

    Examples:
      pgra icl --task sst2 --exemplars knn --num_exemplars 8 --lm bundled:smollm2-135m \
          --encoder bundled:minilm-l6
      pgra icl --task sst2 --exemplars random --redraw --seeds 0 1 2 3 4 --lm facebook/opt-13b
      pgra icl --task sst2 --exemplars knn --farthest --vector_metric euclidean --pooling cls \
          --encoder FacebookAI/roberta-large --lm facebook/opt-13b
      pgra icl --task sst2 --lm openai:MODEL --base_url http://localhost:8000/v1
      accelerate launch --num_processes 8 -m pgra icl --task sst2 --lm facebook/opt-13b
      pgra report runs/ --baseline icl-random

    The same as pgra train --method kate. Vectors, neighbors and answers are kept in
    --artifacts_dir: what was stopped resumes, and another run asks only what is new.
    """
    defaults = {"method": "kate", "output_dir": "runs/{task}-{method}"}
    return run_method(argv, main, "pgra icl", defaults)
