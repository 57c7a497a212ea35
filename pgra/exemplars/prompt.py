"""PGRA's prompts: exemplars drawn for a whole task, or chosen for each query.

One draw serves all splits and the corpus, so that all states are in one space. With `knn` a query
has its nearest training examples (KATE, Liu et al. 2022, section 2.3), the nearest first: the
"default order" of section 5.3.
"""

import logging
import random
from collections.abc import Mapping, Sequence

from pgra.config import find_class
from pgra.core import ALONE, Context, Example, Json
from pgra.errors import ConfigError
from pgra.exemplars import SELECTORS, SelectionArguments
from pgra.exemplars.selection import ExemplarPool, group_rows
from pgra.exemplars.selector import ExemplarSelector
from pgra.exemplars.similarity import DotSimilarity
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt, PromptFormat
from pgra.prompts.template import PromptTemplate
from pgra.retrieval.neighbors import LEAK_RULE, Neighbors

logger = logging.getLogger(__name__)


def build_prompt(
    template: PromptTemplate,
    examples: Sequence[Example],
    words: Mapping[str, str],
    *,
    num_exemplars: int,
    method: str = "balanced",
    seed: int = 0,
) -> FewShotPrompt:
    """Draw exemplars from a labelled training set, in file order, and write the prefix.

    `words` have the task's order of labels. `num_exemplars` is the paper's m; the method (of
    `DRAWN_EXEMPLARS`) "official" takes its own number, 8 to 11 of 8. The seed decides choice and
    order.

    Raises:
        ConfigError: If there are fewer training examples than asked for.
    """
    if num_exemplars == 0:
        return FewShotPrompt(template)
    if len(examples) < num_exemplars:
        raise ConfigError(
            f"num_exemplars is {num_exemplars}, but there are only {len(examples)} training "
            "examples: ask for fewer"
        )
    draw = find_class("selector", method, SELECTORS).draw
    rows = range(len(examples))
    groups = group_rows(rows, [e.label for e in examples], list(words))
    drawn = draw(rows, groups, num_exemplars, random.Random(seed))
    return PromptFormat(template, words).prompt([examples[row] for row in drawn])


class NearestExemplars:
    """Writes each query's prompt: the training examples that a selector chooses, nearest first."""

    def __init__(self, neighbors: Neighbors, style: PromptFormat, args: SelectionArguments) -> None:
        """Open the selector; nothing is encoded yet.

        Raises:
            ConfigError: If there are not more training examples than a prompt has, as an example is
                not its own exemplar; or if the selector is unknown.
        """
        if len(neighbors.examples) <= args.count:
            raise ConfigError(
                f"num_exemplars is {args.count}, and a training example may be the exemplar of "
                f"others only, but there are only {len(neighbors.examples)} of them: ask for fewer"
            )
        self.neighbors, self.count = neighbors, args.count
        self._args, self._format = args, style
        pool = ExemplarPool(neighbors.examples, args.leak_jaccard)
        self._selector = ExemplarSelector.of(args, pool, DotSimilarity(neighbors)).under(args)
        self._chosen: dict[str, tuple[Example, ...]] = {}
        self._shortened: set[str] = set()

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Everything that a query's prompt depends on, besides the template."""
        near = self.neighbors.fingerprint if self._selector.compares else {}
        return {
            **self._selector.fingerprint,
            "leak_jaccard": self._args.leak_jaccard,
            "leak_rule": LEAK_RULE,
            "words": dict(self._format.words),
            **{f"exemplar {name}": value for name, value in near.items()},
        }

    def warn_shortened(self) -> None:
        """Warn of queries with shortened prompts, and reset their count."""
        if self._shortened:
            logger.warning(
                "%d queries got fewer than %d exemplars, so that they fit the LM's window",
                len(self._shortened),
                self.count,
            )
        self._shortened.clear()

    def look_up(self, queries: Sequence[Example], context: Context = ALONE) -> None:
        """Choose the exemplars of queries that are not known yet; one search for all of them."""
        new = {query.text: query for query in queries if query.text not in self._chosen}
        if self._selector.compares:  # every process comes by here, with new queries or not
            self.neighbors.vectors(context)
        if not new:
            return
        chosen = self._selector.choose(list(new.values()))
        for index, text in enumerate(new):
            rows = chosen.of(index)
            self._chosen[text] = tuple(self.neighbors.examples[row] for row in rows)
        logger.info(
            "neighbors: %d of %d queries have a copy of their text, or nearly one, among the %d "
            "training examples, which was left out",
            int((chosen.num_dropped > 0).sum()),
            len(new),
            len(self.neighbors.examples),
        )

    def of(self, query: Example) -> tuple[Example, ...]:
        """Return a query's exemplars in the order of choice; `look_up` has seen it."""
        return self._chosen[query.text]

    def prompt(self, exemplars: Sequence[Example]) -> FewShotPrompt:
        return self._format.prompt(exemplars)

    def encoder_for(self, base: PromptedEncoder, query: Example) -> PromptedEncoder:
        """Return the LM (`base` has no exemplars) under as many of them as leave the query whole.

        The last chosen are left out first. The query is cut only where it alone is too long.

        Raises:
            ConfigError: If not even a prompt without exemplars leaves room for a text.
        """
        chosen = self.of(query)
        for count in range(len(chosen), -1, -1):
            try:
                encoder = base.under(self.prompt(chosen[:count]))
            except ConfigError:  # no room for any text
                if not count:
                    raise
                continue
            encoder.tokenize([query.fields])
            if not encoder.num_cut or not count:
                break
        if count < len(chosen):
            self._shortened.add(query.text)
        encoder.num_cut = 0
        return encoder
