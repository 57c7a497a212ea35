"""True and false claims of a corpus, whose sources stay in it or not.

A claim is a sentence with one fact, kept (true) or changed (false), and with some other words
dropped. Only its source shows which it is, so evidence must help.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from pgra.artifacts import Artifact, build_once, is_finished, write_lines
from pgra.config import Arguments, arg
from pgra.data.corpus import Corpus
from pgra.data.tasks import LABEL
from pgra.data.text import LEAK_JACCARD, split_words
from pgra.errors import ArtifactError, DataError
from pgra.types import Fields, Json

KINDS = ("year", "number", "entity")
_WORDS = range(10, 25)  # of a source
_YEARS_OFF = range(3, 18)


@dataclass(kw_only=True)
class ClaimsArguments(Arguments):
    """Which claims, how many, and where they go."""

    kind: str = arg(
        "year",
        "What is kept or changed: year (by 3 to 17), number (same digits), entity (capitalised).",
        choices=KINDS,
    )
    output_dir: str = arg(
        "",
        "New folder for train.jsonl, validation.jsonl, test.jsonl and corpus.txt.",
        must_be_given=True,
        decides=False,
    )
    num_train: int = arg(2000, "Claims to train on, half of them true.", least=2)
    num_dev: int = arg(200, "Claims to choose a checkpoint on.", least=2)
    num_test: int = arg(800, "Claims to report on.", least=2)
    keep_words: float = arg(
        0.65, "Share of a sentence's other words that its claim keeps.", above=0, most=1
    )
    source_share: float = arg(
        1.0,
        "Share of claims whose sources stay in the corpus; others, and near copies, are taken out.",
        least=0,
        most=1,
    )
    seed: int = arg(0, "Seed of all that is drawn.", least=0)
    artifacts_dir: str = arg("artifacts", "Where corpora are kept that were read.", decides=False)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the claims of each split, test first: it does not depend on the other sizes."""
        return {"test": self.num_test, "validation": self.num_dev, "train": self.num_train}


# Facts: words of a kind that occur once in a sentence.


class Fact(NamedTuple):
    """The one fact of a sentence: `text`, in `words[start:stop]` with marks around it."""

    start: int
    stop: int
    text: str


_YEAR = "(?:1[0-9]{3}|20[0-2][0-9])"
_PARTS = re.compile(r"(\W*)(.*?)((?:['\u2019]s)?\W*)", re.DOTALL)  # a word between its marks
_MARKED = {
    "year": re.compile(rf".*(?<![0-9]){_YEAR}(?![0-9])"),
    "number": re.compile(rf"(?!\W*{_YEAR}\W*$).*[0-9]"),
}
_WHOLE = {
    "year": re.compile(_YEAR),
    "number": re.compile(rf"(?!{_YEAR}$)[1-9][0-9]*(,[0-9]{{3}})*(\.[0-9]+)?"),
    "entity": re.compile(r"\w.*\w"),
}


def find_fact(words: Sequence[str], kind: str) -> Fact | None:
    """Return the one fact of a kind of `KINDS`; None if there is none, several or half of one."""
    if len(words) not in _WORDS:
        return None
    parts = [match.groups() for match in map(_PARTS.fullmatch, words) if match]
    runs: list[list[int]] = []
    for number, (before, core, _) in enumerate(parts):
        is_marked = _MARKED[kind].match(words[number]) if kind in _MARKED else core[:1].isupper()
        if not is_marked:
            continue
        if runs and runs[-1][-1] == number - 1 and not parts[number - 1][2] + before:
            runs[-1].append(number)
        else:  # marks end an entity: "Paris, France" are two
            runs.append([number])
    if kind == "entity":  # every sentence begins with a capital
        runs = [run for run in runs if run[0]]
    if len(runs) != 1:
        return None
    start = runs[0][0]
    stop = runs[0][-1] + 1
    text = " ".join(words[start:stop])
    text = text.removeprefix(parts[start][0]).removesuffix(parts[stop - 1][2])
    if not _WHOLE[kind].fullmatch(text) or _count(text, words) > 1:  # the first word may say it too
        return None
    return Fact(start, stop, text)


def _count(text: str, words: Sequence[str]) -> int:
    """Return how often a sentence says a text, in letters of any case."""
    return len(re.findall(rf"(?<!\w){re.escape(text)}(?!\w)", " ".join(words), re.IGNORECASE))


def _shape(text: str, kind: str) -> str:
    """Return what two facts must have in common for one to replace the other."""
    return str(len(text.split())) if kind == "entity" else re.sub("[0-9]", "0", text)


class _Copies:
    """Finds passages that have a fact of one of some sentences, in nearly its words."""

    def __init__(self) -> None:
        self._by_word: defaultdict[str, list[tuple[frozenset[str], ...]]] = defaultdict(list)

    def add(self, sentence: str, fact: str) -> None:
        self._by_word[min(_words(fact))].append((_words(fact), _words(sentence)))

    def __contains__(self, passage: str) -> bool:
        words = _words(passage)
        for word in words & self._by_word.keys():
            for fact, others in self._by_word[word]:
                is_near = len(words & others) >= LEAK_JACCARD * len(words | others)
                if is_near and fact <= words:
                    return True
        return False


def _words(text: str) -> frozenset[str]:
    return frozenset(split_words(text))


# Claims, and the folder of them.


def make_claims(corpus: Corpus, args: ClaimsArguments) -> Artifact:
    """Make claims and the corpus to search for their sources, unless the same are there.

    A claim has an id, its text and label, the row of its source in the corpus as it was, the
    sentence there, the fact in it, and what is written in its place. The artifact's counts are
    "found" (sentences with one fact), the claims of each split, "passages" that are left, and how
    many were taken out: "sources_out", "copies_out".

    Raises:
        DataError: If the corpus has too few sentences with one fact of the kind.
        ArtifactError: If the folder holds anything else.
    """
    folder = Path(args.output_dir)
    if not is_finished(folder) and folder.exists() and any(folder.iterdir()):
        raise ArtifactError(f"{folder} holds something else: give a new folder as --output_dir")
    return build_once(
        folder,
        stage="claims",
        fingerprint={**args.deciding(), **corpus.fingerprint},
        build=lambda aside: _write(corpus, args, aside),
    )


def _write(corpus: Corpus, args: ClaimsArguments, folder: Path) -> Fields:
    facts = {}
    for row, text in enumerate(corpus):
        if fact := find_fact(text.split(), args.kind):
            facts[row] = fact
    claims = _draw_claims(corpus, args, facts)
    without_source = _Copies()
    counts = {"found": len(facts), "sources_out": 0, "passages": 0}
    for split, size in args.sizes.items():
        rows = list(islice(claims, size))
        if len(rows) < size:
            raise DataError(
                f"too few sentences have one {args.kind} ({len(facts):,}): ask for fewer claims"
            )
        write_lines(folder / f"{split}.jsonl", rows)
        # Of one order the first so many stay: what stays with a smaller share, stays with a larger.
        order = Random(f"{args.seed} {split} sources").sample(rows, size)
        taken_out = order[round(args.source_share * size) :]
        for claim in taken_out:
            without_source.add(str(claim["sentence"]), str(claim["fact"]))
        counts[split] = size
        counts["sources_out"] += len(taken_out)
    with (folder / "corpus.txt").open("w", encoding="utf-8") as file:
        for passage in corpus:
            if passage not in without_source:
                file.write(f"{passage}\n")
                counts["passages"] += 1
    return {**counts, "copies_out": len(corpus) - counts["passages"] - counts["sources_out"]}


def _draw_claims(
    corpus: Corpus, args: ClaimsArguments, facts: Mapping[int, Fact]
) -> Iterator[dict[str, Json]]:
    """Yield claims of facts by row, in the order of `args.sizes`, until there are no more.

    No two are of one source, of near copies of it, or of one text.
    """
    alike = defaultdict[str, Counter[str]](Counter)
    for fact in facts.values():
        alike[_shape(fact.text, args.kind)][fact.text] += 1
    names: list[str] = []
    labels: list[str] = []
    for split, size in args.sizes.items():
        names += [f"{split}-{number}" for number in range(size)]
        both = ["true"] * (size - size // 2) + ["false"] * (size // 2)
        labels += Random(f"{args.seed} {split} {LABEL}").sample(both, size)
    draw = Random(args.seed)
    copies = _Copies()
    texts = set[str]()
    rows = [*facts]
    for row in draw.sample(rows, len(rows)):
        sentence = corpus[row]
        fact = facts[row]
        words = sentence.split()
        others = alike[_shape(fact.text, args.kind)].copy()  # by how often the corpus has them
        del others[fact.text]
        if args.kind == "year":
            year = int(fact.text)
            others = Counter({y: n for y, n in others.items() if abs(int(y) - year) in _YEARS_OFF})
        other = draw.choices([*others], [*others.values()])[0] if others else None
        rest = [*range(fact.start), *range(fact.stop, len(words))]
        numbers = draw.sample(rest, round(args.keep_words * len(rest)))
        if other is None or _count(other, words) or sentence in copies:
            continue
        label = labels[len(texts)]
        written = fact.text if label == "true" else other
        marked = " ".join(words[fact.start : fact.stop])
        words[fact.start] = marked.replace(fact.text, written, 1)
        text = " ".join(words[number] for number in sorted([*numbers, fact.start]))
        if text in texts:
            continue
        claim: dict[str, Json] = {"id": names[len(texts)], "text": text, "label": label}
        claim |= {"source": row, "sentence": sentence, "fact": fact.text, "written": written}
        yield claim
        texts.add(text)
        copies.add(sentence, fact.text)
