"""`pgra.Reranker`: an LM under a task's prompt orders texts, from Python.

Guo et al. 2023, section 2.2, as a run's second stage does it (`pgra.rerank.prompted`), but states
are kept in memory, not on disk.
"""

import logging
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from pgra.artifacts import TemporaryFolder
from pgra.core import (
    Candidates,
    Example,
    Hit,
    as_list,
    as_texts,
    check_count,
    check_device,
    check_kinds,
)
from pgra.data.examples import class_names, open_rows, read_split
from pgra.data.read import Record, read_label
from pgra.data.tasks import LABEL, Task
from pgra.errors import ConfigError
from pgra.exemplars.prompt import build_prompt
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.stages import prompt_template
from pgra.progress import Bar
from pgra.prompts.fewshot import FewShotPrompt, PromptFormat
from pgra.prompts.template import PromptTemplate
from pgra.rerank.bank import query_key
from pgra.rerank.base import Reference, RerankArguments
from pgra.rerank.similarity import Fitting, Similarity, find_similarity

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
Query = str | Mapping[str, str] | Example
Document = str | Hit

_KEPT_BYTES = 1 << 30  # of states that are kept; those kept longest go first
_QUERY_BYTES = 1 << 27  # of what is compared, at a time
_BLOCK_BYTES = 1 << 25


class Reranker:
    """Orders texts by the similarity of their states to a query's, under one prompt.

    The prompt's prefix runs once. States are kept, up to a gigabyte: no text is read twice.

    Attributes:
        encoder: The LM under the prompt.
        prompt: Prefix and template.
        similarity: The name of how states are compared.
        num_cut: Texts so far that were cut to the LM's window.
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: Any = None,
        *,
        task: str | Path | Task | None = None,
        template: str | None = None,
        words: Mapping[str, str] | None = None,
        answer: str | None = None,
        examples: Iterable[Any] = (),
        num_exemplars: int | None = None,
        seed: int = 0,
        similarity: str = "dot",
        lm_layer: str | float = "last",
        device: str = "auto",
        dtype: str = "auto",
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Write the prompt and find the LM; its weights are loaded on first use.

        Args:
            lm: Hub id, folder or bundled:NAME; a loaded model of transformers, with its tokenizer;
                or a `pgra.CausalLM`.
            tokenizer: That of a loaded model.
            task: A task's name, its YAML, or a `Task`: gives template, label words and inputs.
            template: How a text is shown, such as "Review: {text}"; replaces the task's.
            words: Answer words by label; replace the task's. Default: the labels.
            answer: What follows a text, on a line of its own: "The answer is"; "" for nothing.
            examples: Labelled examples for the prompt, in order: (text, label) pairs, mappings
                with a "label", a `datasets.Dataset`, or `Example`s. None is zero-shot.
            num_exemplars: Draw so many of them, the same number of each label; None: all.
            seed: Of the draw.
            similarity: As `--similarity`: dot (the paper's), cosine; those that are fitted
                (whitened, whitened_cosine, label_words, head) need `fit` first.
            lm_layer: Layer whose states are compared: "last", its number, or a share such as 0.6.
            device: Where the LM runs.
            dtype: Of its weights.
            max_prompt_tokens: Longest prompt; None: the LM's window.

        Raises:
            PgraError: If a name is unknown, an example cannot be read, the prompt leaves no room
                for a text, or the LM cannot be used.
            ValueError: If an argument is of a wrong type, or neither task nor template is given.
        """
        check_device(device, is_used=False)
        check_kinds("text", str | None, template=template, answer=answer)
        check_kinds("the name of one", str, similarity=similarity)
        check_kinds("a mapping of words by label", Mapping | None, words=words)
        if words and not all(isinstance(word, str) for pair in words.items() for word in pair):
            raise ValueError(f"words are {words!r:.80}: give a text by label, a text too")
        if isinstance(examples, Iterator):
            examples = list(examples)
        made = _find_task(task, template, words, answer, examples)
        shown = made if isinstance(made, PromptTemplate) else prompt_template(made)
        self._task = None if isinstance(made, PromptTemplate) else made
        self._inputs, self._words = (
            shown.inputs,
            dict(self._task.prompt_words if self._task else {}),
        )
        pool = self._examples(examples, "examples")
        self.prompt = _write_prompt(shown, pool, self._words, num_exemplars, seed)
        self._rest = [one for one in pool if one.id not in self.prompt.exemplar_ids]
        self._shown = {query_key(one) for one in pool if one.id in self.prompt.exemplar_ids}
        self.similarity, self._class = similarity, find_similarity(similarity)
        if self.similarity == "label_words" and not self._words:
            raise ConfigError("similarity 'label_words' compares label words: give words= or task=")
        args = RerankArguments(
            similarity=similarity,
            lm_layer=str(lm_layer),
            lm_dtype=dtype,
            max_prompt_tokens=max_prompt_tokens,
        )
        if isinstance(lm, CausalLM):
            for name, value, plain in (
                ("lm_layer", args.lm_layer, "last"),
                ("device", device, "auto"),
                ("dtype", dtype, "auto"),
                ("tokenizer", tokenizer, None),
            ):
                if value != plain:
                    raise ConfigError(f"the LM is open already: give {name} to CausalLM instead")
            if self._class.reads_words and not lm.with_head:
                raise ConfigError(
                    f"similarity '{similarity}' needs the LM's head: open it by "
                    "CausalLM(..., with_head=True)"
                )
        else:
            lm = CausalLM(
                lm,
                tokenizer,
                device=device,
                with_head=self._class.reads_words,
                layer=args.lm_layer,
                dtype=dtype,
            )
        self.encoder = PromptedEncoder(
            lm, self.prompt, args.prefix_sharing, args.lm_batch_tokens, args.max_prompt_tokens
        )
        self._fitted: Similarity | None = None
        self._states: dict[str, Floats] = {}

    @property
    def num_cut(self) -> int:
        return self.encoder.num_cut

    @overload
    def rank(
        self, query: Query, documents: Iterable[Document], *, top_k: int | None = ...
    ) -> list[Hit]: ...
    @overload
    def rank(
        self, query: list[Query], documents: Iterable[Document], *, top_k: int | None = ...
    ) -> list[list[Hit]]: ...
    def rank(
        self,
        query: Query | list[Query],
        documents: Iterable[Document],
        *,
        top_k: int | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Order documents by their similarity to a query, or to each of a list of queries.

        Args:
            query: A text; of a task with several inputs a mapping of them. Or a list of queries.
            documents: Texts, or the hits of a search, which keep their places.
            top_k: How many of the best; None: all.

        Returns:
            Hits, best first, ties by place. A list of them for each query of a list.

        Raises:
            PgraError: If the LM cannot be used.
            ValueError: If a query or document is of a wrong type, or the similarity is not fitted.
        """
        if top_k is not None:
            check_count("top_k", top_k)
        given = as_list("documents", documents)
        texts = as_texts("documents", (one.text if isinstance(one, Hit) else one for one in given))
        places = [one.index if isinstance(one, Hit) else at for at, one in enumerate(given)]
        queries = query if isinstance(query, list) else [query]
        scores = self.score(queries, texts)
        rows = np.broadcast_to(np.arange(len(texts)), scores.shape)
        best = Candidates.best(rows, scores, min(top_k or len(texts), len(texts)))
        found = [
            [
                Hit(places[row], float(score), texts[row])
                for row, score in zip(line, values, strict=True)
            ]
            for line, values in zip(best.rows.tolist(), best.scores, strict=True)
        ]
        return found if isinstance(query, list) else found[0]

    def score(self, query: Query | list[Query], documents: Iterable[str]) -> Floats:
        """Return the scores of documents, in the order given, for a query as of `rank`.

        Returns:
            (n,) float32; (B, n) of a list of B queries. A score does not depend on the other texts.
        """
        self._check_fitted()
        queries = query if isinstance(query, list) else [query]
        asked = [Example("", self._fields(one)) for one in queries]
        keys = np.array([query_key(one) for one in asked], np.int64)
        fields = [*(one.fields for one in asked), *self._passages(as_texts("documents", documents))]
        similarity = self._similarity()
        both = self._read(fields)
        scores = _products(similarity, both[: len(asked)], keys, both[len(asked) :])
        return scores if isinstance(query, list) else scores[0]

    def encode(self, documents: Iterable[str]) -> Floats:
        """Return the prompted states of documents, (n, H) float32, in the order given (eq. 2)."""
        return self._read(self._passages(as_texts("documents", documents)))

    def fit(self, documents: Iterable[str], examples: Iterable[Any] | None = None) -> Self:
        """Fit the similarity, in place: to documents such as will be ranked, and to queries.

        Args:
            documents: Texts; of more than 2,000 a draw is read.
            examples: Training queries as the class takes examples, or texts where no label is
                needed; None: the examples given at first that the prompt does not show.

        Raises:
            ConfigError: If there are too few of either, or a label has no example.
        """
        if not self._class.is_fitted:
            return self
        texts = as_texts("documents", documents)
        queries = self._rest if examples is None else self._queries(examples)
        queries = [one for one in queries if query_key(one) not in self._shown]
        reference = Reference(queries, self._words)
        folder = TemporaryFolder()  # for its name: nothing is written
        fitting = Fitting(
            self.similarity,
            self.encoder,
            reference,
            num_rows=len(texts),
            made_of={},
            home=folder.path / "fit",
        )
        drawn = self._passages([texts[row] for row in fitting.rows().tolist()])
        asked = [dict(one.fields) for one in fitting.queries()]
        both = self._read([*asked, *drawn])
        self._fitted = fitting.fit_states(both[len(asked) :], both[: len(asked)])
        return self

    def __repr__(self) -> str:
        name, shown = self.encoder.lm.source.name, len(self.prompt.exemplar_ids)
        return f"Reranker({name!r}, {shown} exemplars, similarity={self.similarity!r})"

    def _check_fitted(self) -> None:
        if self._class.is_fitted and self._fitted is None:
            raise ValueError(
                f"similarity '{self.similarity}' is fitted to documents and training queries: "
                "call fit(documents, examples) first, or use dot or cosine"
            )

    def _similarity(self) -> Similarity:
        if self._fitted is None:
            self._fitted = self._class()
        return self._fitted

    def _examples(self, given: Iterable[Any], name: str) -> list[Example]:
        if self._task is None:
            return []
        listed = as_list(name, given)
        if not listed:
            return []
        rows = given if hasattr(given, "features") else listed
        return read_split(self._task, open_rows(self._task, rows, name), name)

    def _queries(self, given: Iterable[Any]) -> list[Example]:
        listed = as_list("examples", given)
        if all(isinstance(one, str) for one in listed):
            return [Example(f"fit-{at}", self._fields(one)) for at, one in enumerate(listed)]
        if self._task is None:
            raise ConfigError("there are no labels: give task= or words= to the Reranker")
        return self._examples(listed, "examples")

    def _passages(self, texts: Sequence[str]) -> list[dict[str, str]]:
        return [self.prompt.template.passage_fields(text) for text in texts]

    def _fields(self, query: Any) -> dict[str, str]:
        wanted = ", ".join(self._inputs)
        if isinstance(query, str):
            if len(self._inputs) > 1:
                raise ValueError(f"a query has the inputs {wanted}: give a mapping of them")
            return {self._inputs[0]: query}
        fields = query.fields if isinstance(query, Example) else query
        if not isinstance(fields, Mapping):
            raise ValueError(
                f"a query is a text or a mapping of {wanted}, and this is {query!r:.80}"
            )
        if {*fields} != {*self._inputs} or not all(isinstance(v, str) for v in fields.values()):
            raise ValueError(f"a query has the inputs {wanted}, texts, and this is {query!r:.80}")
        return {name: fields[name] for name in self._inputs}

    def _read(self, fields: Sequence[Mapping[str, str]]) -> Floats:
        """Return the states of texts, (n, H); the LM reads those that are not kept."""
        names = [self.prompt.suffix(each) for each in fields]
        if not names:
            return np.empty((0, self.encoder.lm.width), np.float32)
        new = {n: each for n, each in zip(names, fields, strict=True) if n not in self._states}
        cut = self.encoder.num_cut
        if new:
            prompts = self.encoder.tokenize(list(new.values()))
            with Bar(total=len(new), desc="read", unit="text", leave=False) as bar:
                states = self.encoder.encode_prompts(prompts, advance=bar.update)
            self._states.update(zip(new, states.float().numpy(), strict=True))
        if cut := self.encoder.num_cut - cut:
            logger.warning(
                "%d of %d texts are too long for the %d tokens of a prompt: their ends are not "
                "read",
                cut,
                len(new),
                self.encoder.limit,
            )
        found = np.stack([self._states[name] for name in names])
        most = max(1, _KEPT_BYTES // found[0].nbytes)
        for name in list(self._states)[: max(0, len(self._states) - most)]:
            del self._states[name]
        return found


def _find_task(
    task: str | Path | Task | None,
    template: str | None,
    words: Mapping[str, str] | None,
    answer: str | None,
    examples: Iterable[Any],
) -> Task | PromptTemplate:
    """Return the task, one made of a template and words, or, without labels, the template."""
    given: dict[str, Any] = {"prompt": template, "prompt_words": words, "answer": answer}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(task, str | Path):
        task = Task.load(str(task))
    if isinstance(task, Task):
        return replace(task, **given)
    if task is not None:
        raise ValueError(f"task is of type {type(task).__name__}: give a name, a YAML or a Task")
    if template is None:
        raise ValueError('give task=, or template=, such as template="Review: {text}"')
    try:
        slots = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:  # a stray brace: reported below
        slots = []
    inputs = tuple(dict.fromkeys(slots)) or ("text",)
    labels = tuple(words) if words else _labels_of(examples)
    if not labels:
        shown = PromptTemplate(template, inputs=inputs)
        return shown if answer is None else replace(shown, answer=answer)
    return Task(
        name="template",
        inputs=inputs,
        labels=labels,
        reader_template=" ".join(f"{{{name}}}" for name in inputs),
        verbalizer=words or {label: label for label in labels},
        **given,
    )


def _labels_of(examples: Iterable[Any]) -> tuple[str, ...]:
    """Return the different labels of examples, in order, or as their data set names them."""
    if names := class_names(examples, LABEL):
        return tuple(names)
    labels: dict[str, None] = {}
    for place, one in enumerate(as_list("examples", examples)):
        if isinstance(one, Mapping):
            label = one.get(LABEL)
        else:
            is_pair = isinstance(one, list | tuple) and len(one) == 2
            label = one.label if isinstance(one, Example) else one[1] if is_pair else None
        labels[read_label(Record(0, {LABEL: label}, f"examples, row {place}"), LABEL)] = None
    return tuple(labels)


def _write_prompt(
    template: PromptTemplate,
    pool: Sequence[Example],
    words: Mapping[str, str],
    count: int | None,
    seed: int,
) -> FewShotPrompt:
    if count is None:
        return PromptFormat(template, words).prompt(pool)
    if count:
        check_count("num_exemplars", count)
    return build_prompt(template, pool, words, num_exemplars=count, seed=seed)


def _products(
    similarity: Similarity, queries: Floats, keys: npt.NDArray[np.int64], passages: Floats
) -> Floats:
    """Return the similarity of all queries with all passages, (B, n), a block at a time."""
    scores = np.empty((len(queries), len(passages)), np.float32)
    if not scores.size:
        return scores

    def compared(some: slice) -> Floats:
        states = queries[some]
        return similarity.of_queries(states, keys[some])

    width = max(queries.shape[1], compared(slice(1)).shape[1])
    for start in range(0, len(queries), step := max(1, _QUERY_BYTES // (4 * width))):
        asked = slice(start, start + step)
        left = compared(asked)[:, None]
        for first in range(0, len(passages), size := max(1, _BLOCK_BYTES // (4 * width))):
            some = passages[first : first + size]
            right = similarity.of_passages(some)
            scores[asked, first : first + size] = np.vecdot(left, right)
    return scores
