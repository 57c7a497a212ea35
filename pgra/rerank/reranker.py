"""The prompted reranker: an LM reads query and documents under one prompt.

Guo et al. 2023, section 2.2: states by eq. 2, similarity by eq. 3. The softmax of eq. 3 does not
change the order, so scores are the plain products; others are in `pgra.rerank.similarity`. Each
query has its own prefix in `pgra.rerank.pairs`.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from pgra.arrays import Rows, Scores, Vectors
from pgra.artifacts import artifact_dir
from pgra.config import Arguments as _Arguments
from pgra.config import choose
from pgra.context import ALONE, Context
from pgra.data.corpus import Corpus
from pgra.data.examples import Rows as LabelledRows
from pgra.data.examples import as_rows, open_rows, read_split
from pgra.data.tasks import Task
from pgra.errors import ConfigError
from pgra.exemplars.selector import build_prompt
from pgra.lm import as_state_lm
from pgra.lm.load import batch_budget
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptFormat, PromptTemplate, task_format
from pgra.rerank import find_reranker
from pgra.rerank.bank import Bank, bank_name, query_key
from pgra.rerank.base import (
    AUTO,
    BaseReranker,
    CausalRerankerArguments,
    CrossEncoderArguments,
    LikelihoodArguments,
    Reference,
    RerankArguments,
    RerankRequest,
    ScoringReranker,
    choose_similarity,
)
from pgra.rerank.pairs import NeighborReranker, PairBankReranker
from pgra.rerank.similarity import Fitting, find_similarity, score_candidates
from pgra.types import (
    MISSING_ROW,
    Candidates,
    Example,
    Hit,
    Json,
    Query,
    as_list,
    as_texts,
    check_count,
    is_query,
    read_queries,
)

logger = logging.getLogger(__name__)

_KEPT_NUMBERS = 1 << 28  # of states in memory, a gigabyte


class Reranker(ScoringReranker):
    """Orders texts by the similarity of their prompted states to a query's.

    The prompt's prefix runs once, and no text is read twice: states are kept in memory, up to a
    gigabyte; those of a run's corpus in a bank on disk.

    Attributes:
        encoder: The LM under the prompt; its `num_cut` counts texts cut to the LM's window.
        prompt: Prefix and template.
        similarity: The name of how states are compared.
    """

    encoder: PromptedEncoder
    prompt: FewShotPrompt
    corpus: Corpus
    bank: Bank
    query_bank: Bank
    fitting: Fitting
    context: Context = ALONE
    shard_rows: int

    def __init__(
        self,
        lm: Any,
        tokenizer: Any = None,
        *,
        task: str | Path | Task | None = None,
        template: str | None = None,
        examples: LabelledRows = (),
        num_exemplars: int | None = None,
        seed: int = 0,
        similarity: str = RerankArguments.similarity,
        lm_layer: str | float = "last",
        device: str = "auto",
        dtype: str = "auto",
        max_prompt_tokens: int | None = None,
        chat_template: str = "off",
        by: str = "states",
    ) -> None:
        """Write the prompt and find the LM; its weights are loaded on first use.

        Args:
            lm: Hub id, folder or bundled:NAME; the address of an engine's server, or vllm:NAME; a
                loaded model of transformers, with its tokenizer; a `pgra.CausalLM`, which has its
                layer, device and dtype; or a `PromptedEncoder`, which has its prompt too.
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

        Raises:
            PgraError: If a name is unknown, an example cannot be read, the prompt leaves no room
                for a text, or the LM cannot be used.
            ValueError: If neither task nor template is given.
        """
        self._pairs = None
        if by != "states":
            choose("by", by, ("states", "likelihood", "causal", "cross-encoder"))
            unused: dict[str, object] = {
                "task": task,
                "examples": as_list("examples", examples),
                "num_exemplars": num_exemplars,
                "seed": seed,
                "similarity": similarity != AUTO,
                "lm_layer": lm_layer != "last",
                "chat_template": chat_template != "off",
                "template": template and by == "cross-encoder",
            }
            if names := [name for name, value in unused.items() if value]:
                raise ConfigError(f"by='{by}' does not use {', '.join(names)}: leave it out")
            args = RerankArguments(
                reranker=by,
                lm=lm,
                lm_dtype=dtype,
                lm_tokenizer=tokenizer,
                max_prompt_tokens=max_prompt_tokens,
            )
            self._pairs = _open_pairs(args, template, device)
            return
        self._task: Task | None = None
        self._words: Mapping[str, str] = {}
        self._rest: list[Example] = []  # examples that the prompt does not show
        self._shown: set[int] = set()
        if not isinstance(lm, PromptedEncoder):
            style = self._read_style(task, template)
            pool = self._read_examples(examples)
            prompt = style.prompt(pool)
            if num_exemplars is not None:
                how: Any = {"num_exemplars": num_exemplars, "seed": seed}
                prompt = build_prompt(style.template, pool, style.words, **how)
            self._rest = [one for one in pool if one.id not in prompt.exemplar_ids]
            self._shown = {query_key(one) for one in pool} - {query_key(one) for one in self._rest}
            lm = as_state_lm(lm, tokenizer, layer=str(lm_layer), device=device, dtype=dtype)
            how = {"max_prompt_tokens": max_prompt_tokens, "chat": chat_template}
            lm = PromptedEncoder(lm, prompt, **how)
        self.encoder = lm
        self.counter = self.encoder
        self.prompt = self.encoder.prompt
        self._kept: dict[int, Vectors] = {}
        self._fits_itself = similarity == AUTO
        if similarity == AUTO:
            found = choose_similarity(Reference(self._rest, self._words))
            similarity = found if found == "head" else "calibrated"
        self.similarity, self._class = similarity, find_similarity(similarity)
        self._fitted: Fitting | None = None
        if not self._class.is_fitted:
            self._fitted = Fitting(similarity, Reference(), num_rows=0)

    def __deepcopy__(self, memo: object) -> Self:
        """Return a copy with the same LM, and the states that it has read."""
        return copy.copy(self)

    # Texts that are given, whose states are kept in memory.

    def rank(
        self, query: Query | Iterable[Query], documents: Iterable[str | Hit], k: int | None = None
    ) -> list[Any]:
        """Order documents by their similarity to a query, or to each of a list of queries.

        Args:
            query: A text (of a task with several inputs the first), or a mapping of the inputs. Or
                a list of queries. None is blank.
            documents: Texts, or the hits of a search, which keep their places. A blank one is
                ranked too: it says nothing, and still has its place in the list.
            k: How many of the best; None: all.

        Returns:
            `Hit`s, best first, ties by place. A list of them for each query of a list.

        Raises:
            PgraError: If a query or document cannot be read, or the LM cannot be used.
            ValueError: If the similarity is not fitted.
        """
        if k is not None:
            check_count("k", k)
        given = as_list("documents", documents)
        texts = [one.text if isinstance(one, Hit) else one for one in given]
        places = [one.index if isinstance(one, Hit) else at for at, one in enumerate(given)]
        scores = np.atleast_2d(self.score(query, texts))
        rows = np.broadcast_to(np.arange(len(texts)), scores.shape)
        best = Candidates.best(rows, scores, min(k or len(texts), len(texts)))
        found = [
            [Hit(places[row], float(score), texts[row]) for row, score in zip(*line, strict=True)]
            for line in zip(best.rows.tolist(), best.scores, strict=True)
        ]
        return found[0] if is_query(query) else found

    def score(self, query: Query | Iterable[Query], documents: Iterable[str]) -> Scores:
        """Return the scores of documents, in the order given, for a query as of `rank`.

        Returns:
            (n,) float32; (B, n) of a list of B queries. A score does not depend on the other texts.
        """
        if self._pairs is not None:
            examples = read_queries(query, ("text",))
            scores: Scores = self._pairs.score_texts(examples, as_texts("documents", documents))
            return scores[0] if is_query(query) else scores
        if self._fitted is None and self._class.content_free:
            free = Reference(self._documents(self._class.content_free))
            fitting = Fitting(self.similarity, free, num_rows=0)
            states = self._states(fitting.queries())
            fitting.fit_states(states[:0], states)
            self._fitted = fitting
        if self._fitted is None and self._fits_itself:
            self.fit([example.text for example in self._rest])
        if self._fitted is None:
            raise ValueError(
                f"similarity '{self.similarity}' is fitted: call fit(documents, examples) first"
            )
        examples = self._queries(query)
        similarity = self._fitted.similarity
        queries = similarity.of_queries(self._states(examples), _keys(examples))
        passages = similarity.of_passages(self._states(self._documents(documents)))
        scores = np.vecdot(queries[:, None], passages)
        return scores[0] if is_query(query) else scores

    def fit(self, documents: Iterable[str], examples: LabelledRows | None = None) -> Self:
        """Fit the similarity, in place: to documents such as will be ranked, and to queries.

        A run fits it to its own corpus and training examples.

        Args:
            documents: Texts; of more than 2,000 a draw is read.
            examples: Training queries as the class takes examples, or texts where no label is
                needed; None: the examples given at first that the prompt does not show.

        Raises:
            ConfigError: If there are too few of either, or a label has no example.
        """
        if not self._class.is_fitted or self._class.content_free:
            return self
        shown = self._documents(documents)
        queries = self._rest
        if examples is not None:
            rows = as_rows("examples", examples)
            are_texts = isinstance(rows, list) and all(isinstance(row, str) for row in rows)
            read = self._queries(rows) if are_texts else self._read_examples(rows)
            queries = [one for one in read if query_key(one) not in self._shown]
        reference = Reference(queries, self._words)
        fitting = Fitting(self.similarity, reference, num_rows=len(shown))
        drawn = [shown[row] for row in fitting.rows().tolist()]
        fitting.fit_states(self._states(drawn), self._states(fitting.queries()))
        self._fitted = fitting
        return self

    def __repr__(self) -> str:
        if self._pairs is not None:
            return f"Reranker(by {type(self._pairs).__name__})"
        name = self.encoder.lm.source.name
        shown = len(self.prompt.exemplar_ids)
        return f"Reranker({name!r}, {shown} exemplars, similarity={self.similarity!r})"

    def _read_style(self, task: str | Path | Task | None, template: str | None) -> PromptFormat:
        if (task is None) == (template is None):
            raise ValueError('give task=, or template=, such as template="Review: {text}"')
        if template is not None:
            inputs = tuple(dict.fromkeys(re.findall(r"{([^\W\d]\w*)}", template))) or ("text",)
            return PromptFormat(PromptTemplate(template, "", inputs), {})
        self._task = task if isinstance(task, Task) else Task.load(str(task))
        self._words = self._task.prompt_words
        return task_format(self._task)

    def _documents(self, texts: Iterable[str]) -> list[Example]:
        fields = self.prompt.template.passage_fields
        return [Example("", fields(text)) for text in as_texts("documents", texts)]

    def _queries(self, queries: Any) -> list[Example]:
        return read_queries(queries, self.prompt.template.inputs)

    def _read_examples(self, examples: LabelledRows) -> list[Example]:
        rows = as_rows("examples", examples)
        if isinstance(rows, list) and not rows:
            return []
        if self._task is None:
            raise ConfigError("examples have labels: give task=, such as a pgra.Task")
        return read_split(self._task, open_rows(self._task, rows, "examples"), "examples")

    def _states(self, examples: Sequence[Example]) -> Vectors:
        """Return the states of texts, (n, H); the LM reads those that are not in memory yet."""
        encoder = self.encoder
        keys = _keys(examples).tolist()
        with encoder.lm.busy:  # of several threads one at a time
            if len(self._kept) * encoder.lm.width > _KEPT_NUMBERS:
                self._kept.clear()
            new = {k: one for k, one in zip(keys, examples, strict=True) if k not in self._kept}
            before = encoder.num_cut
            states = encoder.encode_examples(list(new.values()))
            if num_cut := encoder.num_cut - before:
                logger.warning("%d texts were cut to %d tokens of a prompt", num_cut, encoder.limit)
            self._kept.update(zip(new, states, strict=True))
            found = [self._kept[key] for key in keys]
            return np.array(found, np.float32).reshape(len(keys), encoder.lm.width)

    # A run's second stage, with banks in its artifacts folder.

    @classmethod
    def open(cls, request: RerankRequest) -> BaseReranker:
        """Open an LM under the task's prompt, or each query's own.

        Raises:
            ConfigError: If the prompt leaves no room for a text, the similarity cannot be fitted,
                or exemplars for each query are missing.
            ModelError: If the LM cannot be used.
        """
        args = request.args
        device = request.context.device
        if args.per_query:
            return NeighborReranker(request)
        encoder = PromptedEncoder.open(args, request.prompt, device)
        return cls(encoder, similarity=args.similarity).over(request)

    def over(self, request: RerankRequest) -> Self:
        """Return the same LM, prompt and similarity for the corpus of a run.

        Raises:
            ConfigError: If the similarity cannot be fitted.
        """
        self._check_states()
        other = copy.copy(self)
        source = self.encoder.lm.source
        other.topic_weight = request.args.topic_weight or 0.0
        other.corpus = request.corpus
        other.context = request.context
        other.shard_rows = batch_budget(request.args.bank_shard_rows, self.encoder.lm.device)
        # whatever the corpus
        made_of = self.encoder.fingerprint
        name = bank_name(source.name)
        fields = {**made_of, **request.corpus.fingerprint}
        home = request.context.artifacts / "banks"
        other.bank = Bank(artifact_dir(home, name, fields), fields, inputs=source.inputs)
        folder = artifact_dir(home, f"{name}-queries", made_of)
        other.query_bank = Bank(folder, made_of, inputs=source.inputs)
        reference = request.reference
        if self._words:
            reference = replace(reference, words=self._words)
        free = self._documents(self._class.content_free)
        other.fitting = Fitting(
            self.similarity,
            replace(reference, queries=free) if free else reference,
            num_rows=0 if free else len(request.corpus),
            made_of={**fields, "reranker": "prompted"},
            home=request.context.artifacts / "similarities" / name,
        )
        return other

    def _check_states(self) -> None:
        if self._pairs is not None:
            raise ConfigError(
                "a run opens it by its name: give reranker='likelihood', lm=..., or the like"
            )

    def arguments(self) -> dict[str, Any]:
        self._check_states()
        return {
            "reranker": "prompted",
            **self.encoder.lm.arguments(),
            "similarity": self.similarity,
            "exemplars": RerankArguments.exemplars,  # one prompt for all queries
            "num_exemplars": len(self.prompt.exemplar_ids),
            "max_prompt_tokens": self.encoder.max_prompt_tokens,
            "chat_template": self.encoder.chat,
        }

    def shows(self, example: Example) -> bool:
        return query_key(example) in self._shown

    @classmethod
    def models(cls, args: RerankArguments, options: _Arguments | None = None) -> list[str]:  # noqa: ARG003
        return [args.lm]

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return self.with_topic(self.fitting.fingerprint)

    def save(self, folder: Path) -> None:
        self.fitting.save(folder)

    def release(self) -> None:
        self.encoder.release()

    def whole_prompt(self, query: Example) -> str:
        return self.prompt.prefix + self.prompt.suffix(query.fields)

    def fill(self, examples: Sequence[Example], rows: Rows) -> int:
        """Let the LM read queries, candidates and the similarity's sample; fit it."""
        wanted = self._wanted(rows)
        queries = {query_key(one): one.fields for one in [*examples, *self.fitting.queries()]}

        def passages(keys: Rows) -> list[Mapping[str, str]]:
            texts = self.corpus.texts(keys)
            return [self.prompt.template.passage_fields(text) for text in texts]

        def asked(keys: Rows) -> list[Mapping[str, str]]:
            return [queries[key] for key in keys.tolist()]

        new = self._fill(self.query_bank, np.array(list(queries), np.int64), asked, "queries")
        new += self._fill(self.bank, wanted, passages, "passages")
        if self.context.part is None:  # other parts may have states that it needs
            self.fitting.fit(self.bank, self.query_bank)
        return new

    def _wanted(self, rows: Rows) -> Rows:
        return np.union1d(rows[rows != MISSING_ROW], self.fitting.rows())

    def count_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        """Count the queries and passages that the LM has yet to read."""
        queries = _keys([*examples, *self.fitting.queries()])
        return len(self.query_bank.missing(queries)) + len(self.bank.missing(self._wanted(rows)))

    def count_texts(self, examples: Sequence[Example], rows: Rows) -> int:
        """Count the distinct queries and passages that the LM reads."""
        queries = _keys([*examples, *self.fitting.queries()])
        return len(np.unique(queries)) + len(self._wanted(rows))

    def _fill(
        self,
        bank: Bank,
        keys: Rows,
        fields: Callable[[Rows], Sequence[Mapping[str, str]]],
        title: str,
    ) -> int:
        return bank.fill(
            keys,
            lambda keys: self.encoder.tokenize(fields(keys)),
            lambda prompts, advance: self.encoder.begin(prompts, advance=advance),
            shard_rows=self.shard_rows,
            context=self.context,
            check=self.encoder.check_kept,
            title=f"LM reads {title}",
        )

    def score_rows(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Return the similarity's scores of candidates (eq. 3), (B, K), -inf where missing."""
        return score_candidates(
            self.bank,
            rows,
            query_bank=self.query_bank,
            query_keys=_keys(examples),
            similarity=self.fitting.similarity,
        )


def _keys(examples: Sequence[Example]) -> Rows:
    return np.array([query_key(example) for example in examples], np.int64)


def _open_pairs(args: RerankArguments, template: str | None, device: str) -> PairBankReranker:
    """Open a reranker of pairs for texts that are given."""
    by = args.reranker
    most = args.max_prompt_tokens
    options: _Arguments
    if by == "likelihood":
        named = {} if template is None else {"likelihood_template": template}
        options = LikelihoodArguments(**named)
    elif by == "causal":
        options = CausalRerankerArguments(
            causal_reranker=args.lm, causal_template=template, causal_tokens=most
        )
    else:
        options = CrossEncoderArguments(cross_encoder=args.lm, cross_encoder_tokens=most)
    nothing: Any = SimpleNamespace(fingerprint={}, texts=list)  # no corpus
    request = RerankRequest(
        args=args,
        prompt=FewShotPrompt(PromptTemplate("{text}")),
        corpus=nothing,
        context=Context(device=device),
        options=options,
    )
    found = find_reranker(by)(request)
    assert isinstance(found, PairBankReranker)
    return found
