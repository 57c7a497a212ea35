"""Second stage: candidates to evidence under a prompt. One class a reranker."""

from collections.abc import Callable
from pathlib import Path

from pgra.config import RerankArguments, choose
from pgra.data.corpus import Corpus
from pgra.errors import ConfigError
from pgra.exemplars.nearest import NearestExemplars
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import batch_budget
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.rerank.base import FirstStageOrder, Reranker, Work
from pgra.rerank.neighbors import NeighborReranker
from pgra.rerank.prompted import AveragedReranker, PromptedReranker
from pgra.rerank.similarity import WAYS, Reference

__all__ = [
    "RERANKERS",
    "AveragedReranker",
    "FirstStageOrder",
    "NearestExemplars",
    "NeighborReranker",
    "PromptedReranker",
    "Reference",
    "Reranker",
    "Work",
    "bank_name",
    "open_prompted_encoder",
    "open_reranker",
]

Opener = Callable[[RerankArguments, FewShotPrompt, Corpus, Path, str, Reference], Reranker]


def open_prompted_encoder(
    args: RerankArguments, prompt: FewShotPrompt, *, device: str = "auto", with_head: bool = False
) -> PromptedEncoder:
    """Open an LM under a prompt; its weights are loaded when they are first needed.

    Args:
        args: Which LM.
        prompt: The task's prompt.
        device: Where it runs.
        with_head: Whether it shall write words too.

    Raises:
        ConfigError: If the prompt leaves no room for a text.
        ModelError: If the LM cannot be used.
    """
    lm = CausalLM.open(args, device, with_head=with_head)
    return PromptedEncoder(
        lm,
        prompt,
        sharing=args.prefix_sharing,
        batch_tokens=args.lm_batch_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
    )


def bank_name(args: RerankArguments) -> str:
    """Give how the folders of an LM's banks begin."""
    return args.lm.removeprefix("bundled:").rstrip("/").split("/")[-1]


def _open_prompted(
    args: RerankArguments,
    prompt: FewShotPrompt,
    corpus: Corpus,
    artifacts: Path,
    device: str,
    reference: Reference,
) -> Reranker:
    with_head = WAYS[args.similarity].reads_words
    first = open_prompted_encoder(args, prompt, device=device, with_head=with_head)
    encoders = [first, *(first.under(other) for other in prompt.others)]
    members = [
        PromptedReranker(
            encoder,
            corpus,
            artifacts,
            similarity=args.similarity,
            shard_rows=batch_budget(args.bank_shard_rows, encoder.lm.device),
            name=bank_name(args),
            full=args.bank == "full",
            bank_dtype=args.bank_dtype,
            reference=reference.of_prefix(place, len(encoders)),
        )
        for place, encoder in enumerate(encoders)
    ]
    return members[0] if len(members) == 1 else AveragedReranker(members)


def _open_under_neighbors(
    args: RerankArguments,
    exemplars: NearestExemplars,
    corpus: Corpus,
    artifacts: Path,
    *,
    device: str,
) -> Reranker:
    encoder = open_prompted_encoder(args, exemplars.prompt(()), device=device)
    return NeighborReranker(
        encoder,
        exemplars,
        corpus,
        artifacts,
        similarity=args.similarity,
        shard_rows=batch_budget(args.bank_shard_rows, encoder.lm.device),
        name=bank_name(args),
    )


def _open_none(*_: object) -> Reranker:
    return FirstStageOrder()


RERANKERS: dict[str, Opener] = {"none": _open_none, "prompted": _open_prompted}


def open_reranker(
    args: RerankArguments,
    prompt: FewShotPrompt,
    corpus: Corpus,
    artifacts: Path,
    *,
    exemplars: NearestExemplars | None = None,
    device: str = "auto",
    reference: Reference = Reference(),  # noqa: B008 (frozen)
) -> Reranker:
    """Open the second stage.

    Args:
        args: Which reranker, with its LM.
        prompt: The task's prompt.
        corpus: What rows stand for.
        artifacts: Root of all products.
        exemplars: Each query's own, with exemplars "knn"; the prompt's prefix is not used then.
        device: Where the LM runs.
        reference: What the task gives a similarity that is fitted to training queries or words.

    Raises:
        ConfigError: If the reranker is unknown, the prompt leaves no room for a text, the
            similarity cannot be fitted, or exemplars "knn" are asked for and not given.
        ArtifactError: If a bank is damaged.
        ModelError: If the LM cannot be used.
    """
    choose("reranker", args.reranker, sorted(RERANKERS))
    if args.reranker == "prompted" and args.exemplars == "knn":
        if exemplars is None:
            raise ConfigError(
                "exemplars 'knn' are chosen from training examples: give open_reranker a "
                "NearestExemplars, or use other exemplars"
            )
        return _open_under_neighbors(args, exemplars, corpus, artifacts, device=device)
    return RERANKERS[args.reranker](args, prompt, corpus, artifacts, device, reference)
