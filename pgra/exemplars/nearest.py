"""A prefix of its own for every query: its nearest training examples (KATE, Liu et al. 2022).

Section 2.3 there: the k nearest by a sentence encoder stand in the prompt, the nearest first (the
"default order" of section 5.3; the reverse is better on one of their three sets, worse on two).
"""

import logging
from collections.abc import Mapping, Sequence

from pgra.config import LEAK_JACCARD
from pgra.core import ALONE, MISSING_ROW, Context, Example, Json
from pgra.errors import ConfigError
from pgra.lm.prefix import PromptedEncoder, Prompts
from pgra.prompts.fewshot import FewShotPrompt, write_prompt
from pgra.prompts.template import PromptTemplate
from pgra.retrieval.neighbors import LEAK_RULE, Neighbors

logger = logging.getLogger(__name__)


class NearestExemplars:
    """Writes each query's prompt: its nearest training examples, nearest first.

    Attributes:
        neighbors: The training examples, and what they are compared by.
        count: Exemplars in a prompt.
    """

    def __init__(
        self,
        neighbors: Neighbors,
        template: PromptTemplate,
        words: Mapping[str, str],
        *,
        count: int,
    ) -> None:
        """Remember what prompts are made of; nothing is encoded yet.

        Args:
            neighbors: The training examples, and what they are compared by.
            template: How a text is shown.
            words: The word that answers, by label.
            count: Exemplars in a prompt, the paper's m.

        Raises:
            ConfigError: If there are not more training examples than a prompt has: a training
                example is not its own exemplar.
        """
        if len(neighbors.examples) <= count:
            raise ConfigError(
                f"num_exemplars is {count}, and a training example may be the exemplar of others "
                f"only, but there are only {len(neighbors.examples)} of them: ask for fewer"
            )
        self.neighbors, self.count = neighbors, count
        self._shortened: set[str] = set()
        self._template, self._words = template, dict(words)
        self._found: dict[str, tuple[Example, ...]] = {}

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that a query's prompt depends on, besides the template."""
        return {
            "exemplars": "knn, nearest first",
            "leak_jaccard": LEAK_JACCARD,
            "leak_rule": LEAK_RULE,
            "num_exemplars": self.count,
            "words": self._words,
            **{f"exemplar {name}": value for name, value in self.neighbors.fingerprint.items()},
        }

    @property
    def num_shortened(self) -> int:
        """Count the queries that got fewer exemplars, so that they fit the LM's window."""
        return len(self._shortened)

    def tell_shortened(self) -> None:
        """Warn of those queries, and begin to count anew."""
        if self._shortened:
            logger.warning(
                "%d queries got fewer than %d exemplars, so that they fit the LM's window",
                len(self._shortened),
                self.count,
            )
        self._shortened.clear()

    def look_up(
        self,
        queries: Sequence[Example],
        context: Context = ALONE,
    ) -> None:
        """Find the exemplars of queries that are not known yet; one search for all of them."""
        new = {query.text: query for query in queries}
        new = {text: query for text, query in new.items() if text not in self._found}
        self.neighbors.vectors(context)  # every process comes by here, with new queries or not
        if not new:
            return
        rows = self.neighbors.nearest_others(list(new.values()), self.count)
        for text, line in zip(new, rows, strict=True):
            chosen = (self.neighbors.examples[row] for row in line if row != MISSING_ROW)
            self._found[text] = tuple(chosen)

    def of(self, query: Example) -> tuple[Example, ...]:
        """Give a query's exemplars, nearest first.

        Raises:
            KeyError: If `look_up` has not seen it.
        """
        return self._found[query.text]

    def prompt(self, exemplars: Sequence[Example]) -> FewShotPrompt:
        """Write the prompt of exemplars, in their order."""
        return write_prompt(self._template, exemplars, self._words)

    def tokenize(self, base: PromptedEncoder, queries: Sequence[Example]) -> Prompts:
        """Write and tokenise each query behind its own exemplars.

        Args:
            base: The LM without exemplars; it reads such prompts whole.
            queries: What `look_up` has seen.

        Raises:
            ConfigError: If not even a prompt without exemplars leaves room for a text.
        """
        fields = [query.fields for query in queries]
        own = (self.encoder_for(base, query) for query in queries)
        pairs = zip(own, fields, strict=True)
        return Prompts(fields, [encoder.tokenize([asked]).ids[0] for encoder, asked in pairs])

    def encoder_for(self, base: PromptedEncoder, query: Example) -> PromptedEncoder:
        """Give the LM under a query's own prompt, with as many exemplars as leave it whole.

        The least similar are left out first. The query is cut only where it alone is too long.

        Args:
            base: The LM without exemplars.
            query: What `look_up` has seen.

        Raises:
            ConfigError: If not even a prompt without exemplars leaves room for a text.
        """
        return self.encoder_under(base, self.of(query), query)

    def encoder_under(
        self, base: PromptedEncoder, chosen: Sequence[Example], query: Example
    ) -> PromptedEncoder:
        """Give the LM under a prompt of given exemplars; see `encoder_for`."""
        for left in range(len(chosen), -1, -1):
            try:
                encoder = base.under(self.prompt(chosen[:left]))
            except ConfigError:  # no room for any text
                if not left:
                    raise
                continue
            encoder.tokenize([query.fields])
            if not encoder.num_cut or not left:
                break
        if left < len(chosen):
            self._shortened.add(query.text)
        encoder.num_cut = 0
        return encoder
