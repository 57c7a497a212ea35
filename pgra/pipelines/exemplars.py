"""Which training examples stand in the LM's prompt: the same for all queries, or each its own."""

from functools import partial

from pgra.config import PgraArguments
from pgra.data.splits import Splits
from pgra.data.tasks import Task
from pgra.prompts.fewshot import FewShotPrompt, build_prompt
from pgra.prompts.template import PromptTemplate
from pgra.rerank import NearestExemplars
from pgra.retrieval.neighbors import Neighbors, open_neighbor_encoder


def write_task_prompt(
    template: PromptTemplate, task: Task, splits: Splits, args: PgraArguments
) -> tuple[FewShotPrompt, NearestExemplars | None]:
    """Write the task's prompt; with exemplars "knn" a bare one, and what chooses each query's own.

    Raises:
        ConfigError: If there are too few training examples.
    """
    if args.rerank.exemplars == "knn":
        neighbors, count = open_neighbors(task, splits, args), args.rerank.num_exemplars
        exemplars = NearestExemplars(neighbors, template, task.prompt_words, count=count)
        return exemplars.prompt(()), exemplars
    prompt = build_prompt(
        template,
        splits.train,
        task.prompt_words,
        num_exemplars=args.rerank.num_exemplars,
        method=args.rerank.exemplars,
        seed=args.rerank.exemplar_seed,
        num_prefixes=args.rerank.num_prefixes,
    )
    return prompt, None


def open_neighbors(task: Task, splits: Splits, args: PgraArguments) -> Neighbors:
    """Give the training examples, to be searched; the encoder is loaded when it is first needed."""
    reader, device = args.reader.model_name_or_path, args.runtime.device
    return Neighbors(
        partial(open_neighbor_encoder, args.retriever, reader, device),
        splits.train,
        args.artifacts / "neighbors" / task.name,
    )


def neighbor_model(args: PgraArguments) -> str:
    """Name the model that examples are compared by, as the user wrote it."""
    if args.retriever.neighbor_encoder == "reader":
        return args.reader.model_name_or_path
    return args.retriever.encoder
