"""Metrics of labels and of written answers, their resampling over examples, tests of a difference.

Exact match and F1 are those of open-domain question answering (SQuAD's official evaluation). PARENT
is that of Dhingra et al. 2019, section 4, with the word overlap model, as in ToTTo's evaluation
(Parikh et al. 2020): precision against the whole table, recall against the highlighted cells, of
text that is lower-cased and split by sacrebleu's tokenizer 13a.

Seeds: mean, sample standard deviation and t interval over runs, and Welch's t-test of two methods'
runs. Examples: one paired bootstrap over the test examples with the trained readers fixed, and an
exact test of the examples that differ; the larger p decides. Metrics are fractions; MCC lies
between -1 and 1.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from statistics import fmean, geometric_mean, harmonic_mean
from typing import Any

import numpy as np
import regex
from rapidfuzz.distance import LCSseq

from pgra.arrays import Counts, Values
from pgra.data.answers import AnsweredExample, SumMetric
from pgra.data.tasks import Metric, find_metric
from pgra.data.text import normalize_answer
from pgra.errors import ConfigError

DRAWS = 2000
_FEW = 16
_FLIPS = 9_999
_DIGITS = 12  # sums in another order differ in a last digit
_SAME = 1e-12


# Of labels.


@dataclass(frozen=True)
class CountsMetric:
    """A metric of the confusion matrix alone, so that resampling needs no examples.

    `of_counts` gives the values (S,) of S matrices (S, C, C), row label and column prediction.
    """

    of_counts: Callable[[Counts], Values]

    def __call__(
        self, labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
    ) -> float:
        n = len(names)
        cells = confusion_cells(labels, predictions, names)
        return float(self.of_counts(np.bincount(cells, minlength=n * n).reshape(1, n, n))[0])


@CountsMetric
def accuracy(counts: Counts) -> Values:
    """Return the share of examples whose label is predicted."""
    return np.asarray(_diagonal(counts).sum(-1) / counts.sum((-2, -1)), np.float64)


@CountsMetric
def macro_f1(counts: Counts) -> Values:
    """Return the mean of F1 over all names; it is 0 for a name that neither side uses."""
    both = (counts.sum(-1) + counts.sum(-2)).astype(np.float64)
    right = 2.0 * _diagonal(counts)
    f1 = np.divide(right, both, out=np.zeros_like(right), where=both > 0)
    return np.asarray(f1.mean(-1), np.float64)


@CountsMetric
def mcc(counts: Counts) -> Values:
    """Return Matthews' correlation for C labels (R_K of Gorodkin 2004).

    It is 0 where it is undefined (a constant side).
    """
    values = counts.astype(np.float64)
    true = values.sum(-1)
    guessed = values.sum(-2)
    total = values.sum((-2, -1))
    top = _diagonal(values).sum(-1) * total - (true * guessed).sum(-1)
    below = np.sqrt((total**2 - (guessed**2).sum(-1)) * (total**2 - (true**2).sum(-1)))
    return np.asarray(np.divide(top, below, out=np.zeros_like(top), where=below > 0), np.float64)


def _diagonal(counts: Any) -> Any:
    return np.diagonal(counts, axis1=-2, axis2=-1)


def no_better_than_one_label(
    split: str, metric: str, value: float, labels: Sequence[str], names: Sequence[str]
) -> str | None:
    """Return a note if a value on a split is not above the commonest label's metric; else None."""
    common = max(names, key=labels.count)
    alone = find_metric(metric)(labels, [common] * len(labels), names)
    if len(set(labels)) < 2 or value > alone:
        return None
    return (
        f"{metric} {value:.4f} on {split} is no better than answering '{common}' to everything "
        f"({alone:.4f})"
    )


def confusion_cells(
    labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
) -> Counts:
    """Return each example's cell in the confusion matrix, row label and column prediction, (B,).

    Raises:
        ValueError: If the lengths differ, or there is nothing.
        KeyError: If a label has no name.
    """
    if not len(labels):
        raise ValueError("there is nothing to measure: no labels")
    number = {name: i for i, name in enumerate(names)}
    n = len(names)
    pairs = zip(labels, predictions, strict=True)
    return np.array([number[a] * n + number[b] for a, b in pairs], dtype=np.int64)


# Of written answers.


_SMALL = 1e-5  # in place of a 0 for pairs of words and longer: the released evaluation's
_Tokens = tuple[str, ...]


def is_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether a prediction is one of the right answers, both normalised.

    As in the official evaluation, an empty prediction matches the answer "A".
    """
    return normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}


def exact_match(text: str, example: AnsweredExample) -> float:
    """Return 1 for one of the right answers, else 0."""
    return float(is_exact_match(text, example.answers))


def f1(text: str, example: AnsweredExample) -> float:
    """Return the harmonic mean of precision and recall of words, by the answer that suits best.

    Rajpurkar et al. 2016, section 6.1; both sides are normalised.
    """
    words = Counter(normalize_answer(text).split())
    best = 0.0
    for answer in example.answers:
        right = Counter(normalize_answer(answer).split())
        both = (words & right).total()
        total = words.total() + right.total()
        best = max(best, 2 * both / total if total else 1.0)
    return best


_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


@lru_cache(1 << 16)
def _tokens_apart(text: str) -> str:
    """Return a text's lower-case words and marks, each between two spaces."""
    return f" {' '.join(_TOKEN.findall(unicodedata.normalize('NFC', text).lower()))} "


def has_answer(passage: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers stands in a passage, its tokens in a row; case does not count.

    As DPR's evaluation of retrieval (Karpukhin et al. 2020, section 3.1).
    """
    return any(_tokens_apart(answer) in _tokens_apart(passage) for answer in answers)


def contains(text: str, example: AnsweredExample) -> float:
    """Return 1 if one of the right answers stands in a text, else 0 (Mallen et al. 2023)."""
    return float(has_answer(text, example.answers))


def bleu_counts(texts: Sequence[str], examples: Sequence[AnsweredExample]) -> list[list[int]]:
    """Return what BLEU is made of, for each of B sentences with at least one reference each.

    Rows of 10 numbers: its words, those of the reference of the nearest length, how many of its 1-
    to 4-grams stand in a reference, and how many it has. ToTTo's evaluation lower-cases, and so do
    we for every table.
    """
    from sacrebleu.metrics.bleu import BLEU

    is_table = examples[0].table is not None
    bleu = BLEU(lowercase=is_table, effective_order=True)  # or it warns; counts are the same
    rows = []
    for text, example in zip(texts, examples, strict=True):
        score = bleu.sentence_score(text, example.answers)
        rows.append([score.sys_len, score.ref_len, *score.counts, *score.totals])
    return rows


def bleu_of_counts(counts: Sequence[int]) -> float:
    """Return BLEU of the sum of rows of `bleu_counts`, a fraction, by sacrebleu with its defaults.

    Papineni et al. 2002; Post 2018.
    """
    from sacrebleu.metrics.bleu import BLEU

    size, reference, *grams = map(int, counts)
    score = BLEU.compute_bleu(grams[:4], grams[4:], size, reference, "exp").score
    return float(score) / 100


bleu = SumMetric(bleu_counts, bleu_of_counts)


def parent(text: str, example: AnsweredExample) -> float:
    """Return PARENT's F of a sentence that describes a table."""
    table = example.table
    if table is None:
        raise ConfigError("metric 'parent' is for tables (kind totto or fetaqa): leave it out")
    return harmonic_mean(parent_scores(text, example.answers, table.values, table.chosen_values))


def parent_scores(
    text: str, references: Sequence[str], values: Sequence[str], chosen: Sequence[str]
) -> tuple[float, float]:
    """Return PARENT's precision and recall of a sentence, by the reference of the best F.

    They are fractions: how much of it stands in the reference, or follows from the table, and how
    much of the reference and of the chosen cells it states. `values` are all of the table's cells,
    titles included, `chosen` the highlighted ones.
    """
    tokens = tokenize(text)
    table_words = frozenset[str]().union(*map(tokenize, values))
    cells = [cell for cell in map(tokenize, chosen) if cell]
    scores = (_against(tokens, tokenize(reference), table_words, cells) for reference in references)
    return max(scores, key=harmonic_mean)


@cache
def _cutter() -> Any:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()


def tokenize(text: str) -> _Tokens:
    """Split a text into lower-case words and punctuation."""
    return tuple(_cutter()(text.strip().lower()).split())


def _against(
    text: _Tokens, reference: _Tokens, table_words: frozenset[str], chosen: Sequence[_Tokens]
) -> tuple[float, float]:
    """Compare with one reference; the table's words are without column names, as released."""
    precisions = []
    recalls = []
    for n in (1, 2, 3, 4):
        grams = _grams(text, n)
        right = _grams(reference, n)
        # The share of n-grams that stand in the reference, or else follow from the table.
        supported = 0.0
        for gram, count in grams.items():
            both = min(count, right[gram])
            supported += both + (count - both) * _follows(gram, table_words)
        precisions.append(supported / grams.total() if grams else 0.0)
        # The share of the reference's n-grams in the text, each weighted by how far it follows.
        weights = {gram: _follows(gram, table_words) for gram in right}
        total = sum(count * weights[gram] for gram, count in right.items())
        stated = sum(min(count, grams[gram]) * weights[gram] for gram, count in right.items())
        recalls.append(stated / total if total else 1.0)
    precision = _mean_over_orders(precisions)
    recall = _mean_over_orders(recalls) or _SMALL
    if chosen:
        # Its section 4: the less of the table a reference tells, the more the table itself counts.
        weight = 1 - _mentioned(chosen, reference)
        recall = recall ** (1 - weight) * (_mentioned(chosen, text) or _SMALL) ** weight
    return precision, recall


def _follows(gram: _Tokens, table_words: frozenset[str]) -> float:
    return sum(word in table_words for word in gram) / len(gram)


def _grams(tokens: _Tokens, n: int) -> Counter[_Tokens]:
    return Counter(tokens[i : i + n] for i in range(len(tokens) - n + 1))


def _mean_over_orders(values: Iterable[float]) -> float:
    """Return the geometric mean: 0 without a right word; a longer n-gram's 0 is `_SMALL`."""
    first, *others = values
    if not first:
        return 0.0
    return geometric_mean([first, *(value or _SMALL for value in others)])


def _mentioned(values: Sequence[_Tokens], text: _Tokens) -> float:
    """Return the mean share of each value's words that a text has in their order."""
    return fmean(LCSseq.similarity(value, text) / len(value) for value in values)


# What a run's metric is made of, for each of B examples. A resample of the examples is how often
# each kind was drawn: examples of one kind count alike.


@dataclass(frozen=True)
class LabelOutcomes:
    """The true and the predicted label of each example; `names` are the task's labels."""

    metric: str
    labels: Sequence[str]
    predicted: Sequence[str]
    names: Sequence[str]

    @property
    def function(self) -> Metric:
        return find_metric(self.metric)

    @property
    def value(self) -> float:
        return float(self.function(self.labels, self.predicted, self.names))

    @property
    def kinds(self) -> Counts:
        """Each example's cell of the confusion matrix, (B,)."""
        return confusion_cells(self.labels, self.predicted, self.names)

    @property
    def parts(self) -> Values | None:
        """What each example adds to B times the metric, (B,); None where it is not a mean."""
        if self.function is not accuracy:
            return None
        return np.array(np.array(self.labels) == np.array(self.predicted), np.float64)

    @property
    def traits(self) -> Values:
        """Numbers of each example, (B, R), that differ where two runs' outcomes do."""
        columns = self.kinds[:, None] % len(self.names) == np.arange(len(self.names))
        return np.asarray(columns, np.float64)

    def resample(self, kinds: Counts, counts: Values) -> Values:
        """Return the metric of resamples, (draws,): how often each kind (U,) was drawn."""
        metric = self.function
        n = len(self.names)
        if isinstance(metric, CountsMetric):
            # As float64 the product runs on BLAS; counts are far below 2**53, so it is exact.
            matrices = np.rint(counts @ (kinds[:, None] == np.arange(n * n)).astype(np.float64))
            return metric.of_counts(matrices.astype(np.int64).reshape(-1, n, n))
        names = np.array(self.names)
        values = []
        for row in counts:
            drawn = np.repeat(kinds, row.astype(np.int64))
            labels = names[drawn // n].tolist()
            values.append(metric(labels, names[drawn % n].tolist(), self.names))
        return np.array(values, np.float64)


@dataclass(frozen=True, eq=False)
class TextOutcomes:
    """Measures of written texts, as rows of numbers; a duck type of `LabelOutcomes`.

    BLEU (Papineni et al. 2002) follows from the sum of the texts' counts (B, 10) by `of_sum`,
    others, such as PARENT's F (Dhingra et al. 2019), are the mean over texts (B, 1): such are
    `traits`. So a resample of the queries is a resample of rows: the paired bootstrap of Koehn
    2004.
    """

    metric: str
    traits: Values
    of_sum: Callable[[Sequence[int]], float] | None = None

    @property
    def value(self) -> float:
        return float(self._of_sums(self.traits.sum(axis=0)[None])[0])

    @property
    def kinds(self) -> Counts:
        """The first row that is equal, (B,)."""
        _, first, group = np.unique(self.traits, axis=0, return_index=True, return_inverse=True)
        return np.asarray(first[group])

    @property
    def parts(self) -> Values | None:
        return self.traits[:, 0] if self.of_sum is None else None

    def resample(self, kinds: Counts, counts: Values) -> Values:
        return self._of_sums(counts @ self.traits[kinds])

    def _of_sums(self, sums: Values) -> Values:
        if self.of_sum is None:
            return sums[:, 0] / len(self.traits)
        return np.array([self.of_sum(row) for row in np.rint(sums).astype(np.int64).tolist()])


Outcomes = LabelOutcomes | TextOutcomes


def _draw_counts(kinds: Any, seed: int, draws: int) -> tuple[Any, Values]:
    """Resample B examples (Efron 1979), as counts of those that all S runs decide alike.

    Returns the distinct columns (S, U) of `kinds` (S, B), and how often each was drawn, (draws, U).
    """
    distinct, counts = np.unique(kinds, axis=1, return_counts=True)
    shares = counts / kinds.shape[1]
    drawn = np.random.default_rng(seed).multinomial(kinds.shape[1], shares, size=draws)
    return distinct, drawn.astype(np.float64)


def bootstrap(runs: Sequence[Outcomes], *, seed: int, draws: int = DRAWS) -> Values:
    """Return the metric of several runs in the same resamples of their examples, (S, draws)."""
    kinds, counts = _draw_counts(np.stack([run.kinds for run in runs]), seed, draws)
    return np.stack([run.resample(row, counts) for run, row in zip(runs, kinds, strict=True)])


def interval_95(draws: Values) -> tuple[float, float]:
    """Return the 2.5th and the 97.5th percentile."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True, eq=False)
class Difference:
    """How much better one method is than another on the same examples.

    Attributes:
        difference: Metric of a minus metric of b, each the mean over its seeds.
        draws: The same in each resample of the examples, (draws,).
        differing: How many of the examples the methods decide differently.
        parts: What each example adds to the difference, (B,); None if the metric is not a mean.
    """

    difference: float
    draws: Values
    differing: int
    parts: Values | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the resamples."""
        return interval_95(self.draws)

    @cached_property
    def p(self) -> float:
        """Two-sided p-value of no difference: the larger of the bootstrap's and `exact_p`.

        The bootstrap's is twice the share of resamples on the other side of 0, where 0 itself
        counts, at least 2 / (draws + 1); where few examples differ it is too small.
        """
        other_side = min(int((self.draws <= 0).sum()), int((self.draws >= 0).sum()))
        return max(min(1.0, 2 * (other_side + 1) / (len(self.draws) + 1)), self.exact_p)

    @cached_property
    def exact_p(self) -> float:
        """Two-sided p-value by swapping sides: exact for a mean, else its lower bound.

        If the methods are alike, each example's sides can be swapped. Of the 2 ** k ways for k
        examples that differ, at least the observed one and its mirror image are as extreme,
        whatever the metric (Noreen 1989; Yeh 2000).
        """
        if self.parts is None:
            return min(1.0, 2.0 ** (1 - self.differing))
        return sign_flip(self.parts)


def compare_methods(a: Sequence[Outcomes], b: Sequence[Outcomes], *, seed: int) -> Difference:
    """Compare two methods' mean metric over seeds on the same examples, resampled together."""
    parts_a = [parts for run in a if (parts := run.parts) is not None]
    parts_b = [parts for run in b if (parts := run.parts) is not None]
    if parts_a and parts_b:
        return compare_means(np.mean(parts_a, axis=0), np.mean(parts_b, axis=0), seed=seed)
    values = bootstrap([*a, *b], seed=seed)
    draws = np.round(values[: len(a)].mean(axis=0) - values[len(a) :].mean(axis=0), _DIGITS)
    difference = float(np.mean([run.value for run in a]) - np.mean([run.value for run in b]))
    traits_a = np.mean([run.traits for run in a], axis=0)
    traits_b = np.mean([run.traits for run in b], axis=0)
    differs = np.round(traits_a - traits_b, _DIGITS).any(axis=1)
    return Difference(difference, draws, int(differs.sum()))


def bootstrap_mean(values: Values, *, seed: int) -> Values:
    """Return the mean of each resample of some examples' values, (draws,)."""
    (distinct,), counts = _draw_counts(values[None], seed, DRAWS)
    return np.asarray(np.round(counts @ distinct / len(values), _DIGITS), np.float64)


def compare_means(a: Values, b: Values, *, seed: int) -> Difference:
    """Compare two methods by a value of each example, (B,)."""
    gaps = np.round(a - b, _DIGITS)
    draws = bootstrap_mean(gaps, seed=seed)
    return Difference(float(gaps.mean()), draws, int((gaps != 0).sum()), gaps / len(gaps))


def average_differences(differences: Sequence[Difference]) -> Difference:
    """Return the mean over tasks, whose examples are resampled independently."""
    count = len(differences)
    parts = [gap.parts / count for gap in differences if gap.parts is not None]
    return Difference(
        float(np.mean([gap.difference for gap in differences])),
        np.round(np.stack([gap.draws for gap in differences]).mean(axis=0), _DIGITS),
        sum(gap.differing for gap in differences),
        np.concatenate(parts) if len(parts) == count else None,
    )


def sign_flip(parts: Sequence[float] | Values) -> float:
    """Return the two-sided p of a sum under random signs of its parts (Fisher 1935).

    For parts of one size it is the binomial test, so for right and wrong McNemar's exact test
    (McNemar 1947). Exact for these and for up to 16 parts other than 0; else by 9,999 draws.
    """
    signed = np.asarray(parts, np.float64)
    if not signed.any():
        return 1.0
    signed = np.round(signed / np.abs(signed).max(), _DIGITS)
    signed = signed[signed != 0]
    sizes, counts = np.unique(np.abs(signed), return_counts=True)
    if len(sizes) == 1:
        from scipy.special import bdtr  # scipy.stats takes a second to load

        up = int((signed > 0).sum())
        return min(1.0, 2 * float(bdtr(min(up, len(signed) - up), len(signed), 0.5)))
    least = abs(float(signed.sum())) - 1e-9  # in another order it differs in a last digit
    if len(signed) <= _FEW:
        sums = np.zeros(1)
        for size in np.abs(signed):
            sums = np.concatenate([sums + size, sums - size])
        return float((np.abs(sums) >= least).mean())
    generator = np.random.default_rng(0)
    sums = np.zeros(_FLIPS)
    for size, count in zip(sizes, counts, strict=True):
        sums += size * (2.0 * generator.binomial(count, 0.5, size=_FLIPS) - count)
    return float((1 + (np.abs(sums) >= least).sum()) / (_FLIPS + 1))


def combine_p(p_values: Sequence[float]) -> float:
    """Return one p-value of several tests of one claim, under any dependence (Rueger 1978).

    The k-th smallest of n, times n / k, is a p-value; here k is the lower middle. It combines
    McNemar's tests of several seeds, whose examples are the same.
    """
    n = len(p_values)
    k = (n + 1) // 2
    return min(1.0, sorted(p_values)[k - 1] * n / k)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for all tests together (Holm 1979), in the order given."""
    values = np.array(p_values, np.float64)
    order = values.argsort()
    steps = values[order] * np.arange(len(values), 0, -1)
    values[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return [*values.tolist()]


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of several runs' mean by Student's t."""
    from scipy.special import stdtrit

    n = len(values)
    mean = float(np.mean(values))
    half = float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1)) / n**0.5
    return mean - half, mean + half


def welch(a: Sequence[float] | Values, b: Sequence[float] | Values) -> float | None:
    """Return the two-sided p-value that two methods' seeds have one mean (Welch 1947).

    None where a side has one seed; 0 or 1 where all seeds of each side agree.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    gap = abs(float(np.mean(a) - np.mean(b)))
    error_a = float(np.var(a, ddof=1)) / len(a)
    error_b = float(np.var(b, ddof=1)) / len(b)
    error = error_a + error_b
    if error < _SAME**2:
        return 1.0 if gap < _SAME else 0.0
    from scipy.special import stdtr

    freedom = error**2 / (error_a**2 / (len(a) - 1) + error_b**2 / (len(b) - 1))
    return 2 * float(stdtr(freedom, -gap / math.sqrt(error)))
