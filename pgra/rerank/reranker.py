"""`pgra.Reranker`: orders texts that are given, by any scorer of texts."""

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from pgra.arrays import Scores
from pgra.config import choose
from pgra.context import Context
from pgra.data.examples import ExampleRows, as_rows, open_rows, read_split
from pgra.data.tasks import Task, TaskBase
from pgra.errors import ConfigError
from pgra.exemplars.selector import build_prompt
from pgra.lm import as_state_lm
from pgra.lm.base import DEPTHS
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptFormat, PromptTemplate, task_format
from pgra.rerank import PAIR_RERANKERS, find_reranker
from pgra.rerank.arguments import AUTO, FitData, RerankArguments
from pgra.rerank.base import (
    BaseReranker,
    ReadyReranker,
    RerankRequest,
    ScorerRequest,
    add_topic,
    query_key,
)
from pgra.rerank.pairs import PairBankReranker
from pgra.rerank.similarity import find_similarity
from pgra.rerank.states import (
    BankedReranker,
    PromptedFit,
    PromptedModel,
    StateRanker,
    choose_for_texts,
    encoder_arguments,
)
from pgra.types import (
    Candidates,
    Example,
    Hit,
    Query,
    as_list,
    as_texts,
    check_count,
    is_query,
    read_queries,
)


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt that is written from Python, and the examples that it does not show.

    `exemplar_keys` are the `query_key`s of those that it shows; without a `task` nothing has
    labels.
    """

    prompt: FewShotPrompt
    task: Task | None = None
    rest: Sequence[Example] = ()
    exemplar_keys: Collection[int] = ()

    @classmethod
    def write(
        cls,
        task: str | Path | Task | None,
        template: str | None,
        examples: ExampleRows,
        num_exemplars: int | None,
        seed: int,
    ) -> Self:
        """Write the prompt; arguments and errors as of `Reranker`."""
        if (task is None) == (template is None):
            raise ValueError('give task=, or template=, such as template="Review: {text}"')
        opened = None
        if template is not None:
            inputs = tuple(dict.fromkeys(re.findall(r"{([^\W\d]\w*)}", template))) or ("text",)
            style = PromptFormat(PromptTemplate(template, "", inputs), {})
        else:
            opened = task if isinstance(task, TaskBase) else Task.load(str(task))
            style = task_format(opened)
        pool = read_examples(opened, examples)
        if num_exemplars is None:
            prompt = style.prompt(pool)
        else:
            prompt = build_prompt(
                style.template, pool, style.words, num_exemplars=num_exemplars, seed=seed
            )
        rest = [example for example in pool if example.id not in prompt.exemplar_ids]
        shown_keys = {*map(query_key, pool)} - {*map(query_key, rest)}
        return cls(prompt, opened, rest, shown_keys)

    @property
    def words(self) -> Mapping[str, str]:
        """The word of each label, in the task's order."""
        return self.task.prompt_words if self.task else {}


def read_examples(task: Task | None, examples: ExampleRows) -> list[Example]:
    """Read labelled examples of a task."""
    rows = as_rows(examples)
    if isinstance(rows, list) and not rows:
        return []
    if task is None:
        raise ConfigError("examples have labels: give task=, such as a pgra.Task")
    return read_split(task, open_rows(task, rows, "examples"), "examples")


class Reranker(PromptedModel):
    """Orders texts by the similarity of their prompted states to a query's, or as `by` says.

    The prompt's prefix runs once, and no text is read twice: states are kept in memory, up to a
    gigabyte; those of a run's corpus in a bank on disk.

    Attributes:
        encoder: The LM under the prompt; its `num_cut` counts texts cut to the LM's window.
        prompt: Prefix and template.
        similarity: The name of how states are compared.
    """

    prompt: FewShotPrompt
    similarity: str

    def __init__(
        self,
        lm: Any,
        tokenizer: Any = None,
        *,
        task: str | Path | Task | None = None,
        template: str | None = None,
        examples: ExampleRows = (),
        num_exemplars: int | None = None,
        seed: int = 0,
        similarity: str = RerankArguments.similarity,
        lm_layer: str | float = "last",
        device: str = "auto",
        dtype: str = "auto",
        max_prompt_tokens: int | None = None,
        chat_template: str = "off",
        by: str = "states",
        topic_weight: float | None = None,
    ) -> None:
        """Write the prompt and find the LM; its weights are loaded on first use.

        Args:
            lm: Hub id, folder or bundled:NAME; the address of an engine's server; a
                loaded model of transformers, with its tokenizer; or a `pgra.CausalLM`, which has
                its layer, device and dtype.
            tokenizer: That of a loaded model; of a server the name of its LM's.
            task: A task's name, its YAML, or a `Task`: gives prompt, label words and inputs.
            template: Instead of a task, how a text is shown: "Review: {text}", zero-shot.
            examples: Labelled examples of the task for the prompt, in order: (text, label) pairs,
                mappings with a "label", a `datasets.Dataset`, a pandas table, `Example`s, or a
                file. None is zero-shot.
            num_exemplars: Draw so many of them, the same number of each label; None: all.
            seed: Of the draw.
            similarity: As `--similarity`: dot (the paper's), cosine, calibrated; those that are
                fitted (whitened, whitened_cosine, head) need `fit` first. auto: head, fitted to
                `examples` alone unless `fit` is called, if there are eight of each label that the
                prompt does not show; else calibrated.
            lm_layer: Layer whose states are compared: "last", its number, or a share such as 0.6.
            device: Where the LM runs.
            dtype: Of its weights.
            max_prompt_tokens: Longest prompt; None: the LM's window.
            chat_template: As `--chat_template`.
            by: "states"; or, for facts and questions, "likelihood" (of the query after a document),
                "causal" or "cross-encoder" (a reranker that was trained to judge both together):
                see `--reranker`. These take a name, device and dtype, and as `template` a text with
                {query} and {passage}, but a cross-encoder; None is their own. Likelihood takes the
                `tokenizer` of a server, all `max_prompt_tokens`. Others are refused.
            topic_weight: Of these, as `--topic_weight`, where hits are ranked; None: 1 for
                likelihood.

        Raises:
            PgraError: If a name is unknown, an example cannot be read, the prompt leaves no room
                for a text, or the LM cannot be used.
            ValueError: If neither task nor template is given.
        """
        self._scorer: StateRanker | PairBankReranker
        if by == "states" and topic_weight is not None:
            raise ConfigError("topic_weight is for rerankers of pairs: leave it out")
        if by != "states":
            choose("by", by, ("states", *PAIR_RERANKERS))
            cls: Any = find_reranker(by)
            fields = cls.options_class.FIELDS
            shown = (task, as_list("examples", examples), num_exemplars, seed)
            if (
                shown != (None, [], None, 0)
                or (similarity, lm_layer, chat_template) != (AUTO, "last", "off")
                or (template and "template" not in fields)
            ):
                raise ConfigError(
                    f"by='{by}' uses no task, examples, num_exemplars, seed, similarity, lm_layer "
                    "and chat_template, and a cross-encoder no template: leave them out"
                )
            args = RerankArguments(
                reranker=by,
                lm=lm,
                lm_dtype=dtype,
                lm_tokenizer=tokenizer,
                max_prompt_tokens=max_prompt_tokens,
                topic_weight=topic_weight,
            )
            values = {"lm": lm, "template": template}
            context = Context(device=device)
            options = cls.options_class(
                **{field: values[n] for n, field in fields.items() if values[n] is not None}
            )
            self._scorer = cls(ScorerRequest(args=args, context=context, options=options))
            return
        if isinstance(lm, PromptedFit):
            assert lm.encoder is not None
            keys = lm.fields["exemplar_keys"]
            self._task = TaskPrompt(lm.encoder.prompt, exemplar_keys=keys)
            data = FitData(words=lm.fields["words"])
            self._scorer = StateRanker(lm.encoder, lm.fields["similarity"], data)
            self._scorer.fitted = find_similarity(self._scorer.similarity)(**lm.arrays)
        else:
            self._task = TaskPrompt.write(task, template, examples, num_exemplars, seed)
            data = FitData(self._task.rest, self._task.words)
            reads_depths = find_similarity(choose_for_texts(similarity, data)).reads_depths
            encoder = PromptedEncoder(
                as_state_lm(lm, tokenizer, layer=str(lm_layer), device=device, dtype=dtype),
                self._task.prompt,
                max_prompt_tokens=max_prompt_tokens,
                chat=chat_template,
                depths=DEPTHS if reads_depths else (),
            )
            self._scorer = StateRanker(encoder, similarity, data)
        self.encoder = self._scorer.encoder
        self.prompt = self.encoder.prompt
        self.similarity = self._scorer.similarity

    def __deepcopy__(self, memo: object) -> Self:
        """Return a copy with the same LM, and the states that it has read."""
        return copy.copy(self)

    @overload
    def rank(  # type: ignore[overload-overlap]
        self, query: Query, documents: Iterable[str | Hit], k: int | None = ...
    ) -> list[Hit]: ...
    @overload
    def rank(
        self, query: Iterable[Query], documents: Iterable[str | Hit], k: int | None = ...
    ) -> list[list[Hit]]: ...
    def rank(
        self, query: Query | Iterable[Query], documents: Iterable[str | Hit], k: int | None = None
    ) -> list[Hit] | list[list[Hit]]:
        """Order documents by their similarity to a query, or to each of a list of queries.

        Args:
            query: A text (of a task with several inputs the first), or a mapping of the inputs. Or
                a list of queries. None is blank.
            documents: Texts, or the hits of a search, which keep their places, and whose scores
                are added with `topic_weight`, all standardized. A blank one is ranked too: it says
                nothing, and still has its place in the list.
            k: How many of the best; None: all.

        Returns:
            `Hit`s, best first, ties by place. A list of them for each query of a list.

        Raises:
            PgraError: If a query or document cannot be read, or the LM cannot be used.
            ValueError: If the similarity is not fitted.
        """
        if k is not None:
            check_count("k", k)
        texts = []
        indices = []
        firsts = []
        for index, document in enumerate(as_list("documents", documents)):
            is_hit = isinstance(document, Hit)
            texts.append(document.text if is_hit else document)
            indices.append(document.index if is_hit else index)
            firsts += [document.score] if is_hit else []
        scores = np.atleast_2d(self.score(query, texts))
        rows = np.broadcast_to(np.arange(len(texts)), scores.shape)
        weight = getattr(self._scorer, "topic_weight", 0)
        if weight and is_query(query) and len(firsts) == len(texts):
            first = Candidates(rows, np.array([firsts], np.float32))
            scores = add_topic(scores, first, weight)
        best = Candidates.best(rows, scores, min(k or len(texts), len(texts)))
        hits = []
        for line, values in zip(best.rows.tolist(), best.scores.tolist(), strict=True):
            pairs = zip(line, values, strict=True)
            hits.append([Hit(indices[row], score, texts[row]) for row, score in pairs])
        return hits[0] if is_query(query) else hits

    def score(self, query: Query | Iterable[Query], documents: Iterable[str]) -> Scores:
        """Return the scores of documents, in the order given, for a query as of `rank`.

        Returns:
            (n,) float32; (B, n) of a list of B queries. A score does not depend on the other texts.
        """
        queries = read_queries(query, self._scorer.inputs)
        scores = self._scorer.score(queries, as_texts("documents", documents))
        return scores[0] if is_query(query) else scores

    def fit(self, documents: Iterable[str], examples: ExampleRows | None = None) -> Self:
        """Fit the similarity, in place: to documents such as will be ranked, and to queries.

        A run fits it to its own corpus and training examples. Without a similarity that is fitted
        this does nothing.

        Args:
            documents: Texts; of more than 2,000 a draw is read.
            examples: Training queries as the class takes examples, or texts where no label is
                needed; None: the examples given at first that the prompt does not show.

        Raises:
            ConfigError: If there are too few of either, or a label has no example.
        """
        if not isinstance(self._scorer, StateRanker):
            return self
        queries = None
        if examples is not None:
            rows = as_rows(examples)
            if isinstance(rows, list) and all(isinstance(row, str) for row in rows):
                read = read_queries(rows, self._scorer.inputs)
            else:
                read = read_examples(self._task.task, rows)
            queries = [e for e in read if query_key(e) not in self._task.exemplar_keys]
        self._scorer.fit(as_texts("documents", documents), queries)
        return self

    def _fitted(self) -> PromptedFit:
        ranker = self._state_ranker()
        fields = {
            "similarity": self.similarity,
            "words": dict(ranker.data.words),
            "exemplar_keys": sorted(self._task.exemplar_keys),
        }
        return PromptedFit(ranker.encoder, vars(ranker.require_fit()), fields)

    def _state_ranker(self) -> StateRanker:
        if isinstance(self._scorer, StateRanker):
            return self._scorer
        raise ConfigError(
            "a reranker of pairs is opened by its name: give reranker='likelihood', lm=..., or the "
            "like"
        )

    def __repr__(self) -> str:
        if not isinstance(self._scorer, StateRanker):
            return f"Reranker(by {type(self._scorer).__name__})"
        name = self.encoder.lm.source.name
        count = len(self.prompt.exemplar_ids)
        return f"Reranker({name!r}, {count} exemplars, similarity={self.similarity!r})"


def make_ready(reranker: BaseReranker | Reranker) -> ReadyReranker:
    """Return a reranker that was made in Python as a run opens it.

    Raises:
        ConfigError: If it ranks by pairs: a run opens that by its name.
    """
    if isinstance(reranker, BaseReranker):
        cls = type(reranker)

        def open_object(request: RerankRequest) -> BaseReranker:
            reranker.corpus = request.corpus
            return reranker

        name = f"{cls.__module__}:{cls.__qualname__}"
        prompt = getattr(reranker, "prompt", None)
        return ReadyReranker({"reranker": name}, open_object, prompt)
    ranker = reranker._state_ranker()
    arguments = {
        **encoder_arguments(ranker.encoder),
        "reranker": "prompted",
        "similarity": ranker.similarity,
        "exemplars": RerankArguments.exemplars,  # one prompt for all queries
        "num_exemplars": len(reranker.prompt.exemplar_ids),
    }
    open_banked = partial(BankedReranker, encoder=ranker.encoder)
    return ReadyReranker(arguments, open_banked, reranker.prompt, reranker._task.exemplar_keys)
