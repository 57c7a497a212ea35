"""The log-probability of given words behind prompts that were read once."""

from collections.abc import Sequence

import torch

from pgra.models.reading import KeptPrompts, PromptReader, join

Words = Sequence[Sequence[int]]


def word_chances(
    reader: PromptReader, kept: KeptPrompts, words: Sequence[Words]
) -> list[list[float]]:
    """Score words behind prompts: log P(word | prompt), over all of a word's tokens.

    Args:
        reader: What read the prompts.
        kept: R prompts.
        words: For each prompt the token ids of its words, none empty.

    Returns:
        For each prompt a value a word.
    """
    first = kept.logits.log_softmax(dim=1).cpu()
    found = [[float(first[row, word[0]]) for word in own] for row, own in enumerate(words)]
    longer = [
        (row, i) for row, own in enumerate(words) for i, word in enumerate(own) if len(word) > 1
    ]
    if not longer:
        return found
    repeated = join([kept]).take([row for row, _ in longer])
    logits = reader.go_on(repeated, [words[row][i][:-1] for row, i in longer])
    rest = torch.log_softmax(logits, dim=2).cpu()
    for line, (row, i) in enumerate(longer):
        later = words[row][i][1:]
        found[row][i] += sum(float(rest[line, place, token]) for place, token in enumerate(later))
    return found
