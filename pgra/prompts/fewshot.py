"""Few-shot prefixes: which labelled examples stand before every text of a task, and in what order.

One draw serves all splits and the corpus, so that all states live in one space. (Prefixes that
differ by query are another thing: `pgra.exemplars.nearest`.)
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pgra.core import Example, Json
from pgra.errors import ConfigError
from pgra.prompts.template import INSTRUCTION, SEPARATOR, PromptTemplate


@dataclass(frozen=True)
class FewShotPrompt:
    """A task's prompt: everything of h*(x) = LM(prefix + P(x)) but the LM and x.

    Attributes:
        template: How a text is shown.
        prefix: Instruction and exemplars, without the blank line that ends them; "" for none.
        exemplar_ids: Which training examples stand in it, in its order.
        others: The same template behind other draws of exemplars, over which scores are averaged.
    """

    template: PromptTemplate
    prefix: str = ""
    exemplar_ids: tuple[str, ...] = ()
    others: tuple["FewShotPrompt", ...] = ()

    @property
    def shown_ids(self) -> set[str]:
        """Give all training examples that stand in any of the prefixes."""
        return {name for one in (self, *self.others) for name in one.exemplar_ids}

    def suffix(self, fields: Mapping[str, str]) -> str:
        """Render one text; `prefix + suffix` is the whole prompt."""
        return self.template.render_query(fields, after_prefix=bool(self.prefix))

    @property
    def fingerprint(self) -> dict[str, Json]:
        """Give what a state depends on, besides the LM."""
        return {
            "prefix": self.prefix,
            "template": self.template.body,
            "answer": self.template.answer,
            "inputs": list(self.template.inputs),
        }


def build_prompt(
    template: PromptTemplate,
    examples: Sequence[Example],
    words: Mapping[str, str],
    *,
    num_exemplars: int,
    method: str = "balanced",
    seed: int = 0,
    num_prefixes: int = 1,
) -> FewShotPrompt:
    """Choose exemplars from a training set and write the prefix, or several.

    Args:
        template: How a text is shown.
        examples: The training set, in file order, labelled.
        words: The word that answers, by label, in the task's order of labels.
        num_exemplars: The paper's m. `official` takes its own number, 8 to 11 of 8.
        method: A name in `EXEMPLAR_METHODS`.
        seed: Seed of choice and order; further prefixes have the seeds after it.
        num_prefixes: How many draws; those after the first are the prompt's `others`.

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
    choose = EXEMPLAR_METHODS[method]
    first, *others = (
        write_prompt(
            template, choose(examples, list(words), num_exemplars, random.Random(one)), words
        )
        for one in range(seed, seed + num_prefixes)
    )
    return replace(first, others=tuple(others))


def write_prompt(
    template: PromptTemplate, exemplars: Sequence[Example], words: Mapping[str, str]
) -> FewShotPrompt:
    """Write the prefix of exemplars that are chosen; without any there is none.

    Args:
        template: How a text is shown.
        exemplars: Labelled, in the order in which they are shown.
        words: The word that answers, by label.
    """
    if not exemplars:
        return FewShotPrompt(template)
    shown = [template.render_exemplar(e.fields, words[e.label or ""]) for e in exemplars]
    prefix = INSTRUCTION + SEPARATOR.join(shown)
    return FewShotPrompt(template, prefix, tuple(e.id for e in exemplars))


def _by_label(examples: Sequence[Example]) -> dict[str, list[Example]]:
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        groups[example.label or ""].append(example)
    return groups


def _choose_random(
    examples: Sequence[Example], _labels: list[str], count: int, rng: random.Random
) -> list[Example]:
    return rng.sample(list(examples), count)


def _choose_balanced(
    examples: Sequence[Example], labels: list[str], count: int, rng: random.Random
) -> list[Example]:
    """Take the labels in turn, so that their numbers differ by at most one while they last."""
    groups = _by_label(examples)
    for label in labels:
        rng.shuffle(groups[label])
    order = rng.sample(labels, len(labels))  # which label is one ahead must not depend on the YAML
    chosen: list[Example] = []
    while len(chosen) < count:
        for label in order:
            if groups[label] and len(chosen) < count:
                chosen.append(groups[label].pop())
    rng.shuffle(chosen)
    return chosen


def _choose_official(
    examples: Sequence[Example], labels: list[str], count: int, rng: random.Random
) -> list[Example]:
    """Do as the released code: in file order under a cap a class, until all classes are there.

    It shuffles unseeded, differently for each split; here one seeded order serves all.
    """
    cap = count // len(labels) + 1
    groups: dict[str, list[Example]] = {label: [] for label in labels}
    for example in examples:
        group = groups[example.label or ""]
        if len(group) < cap:
            group.append(example)
        if sum(map(len, groups.values())) >= count and all(groups.values()):
            break
    chosen = [example for group in groups.values() for example in group]
    rng.shuffle(chosen)
    return chosen


EXEMPLAR_METHODS = {
    "balanced": _choose_balanced,
    "official": _choose_official,
    "random": _choose_random,
}
