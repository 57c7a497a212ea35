"""Claims of a corpus: true or false by one fact, drawn the same each time, sources in it or not."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.data.claims import KINDS, ClaimsArguments, find_fact, make_claims
from pgra.data.corpus import CorpusArguments, open_corpus

SPLITS = {"train": 7, "validation": 4, "test": 6}
WORDS = [a + b for a in "bdfghk" for b in ("ar", "el", "in", "ot", "us")]
NAMES = ["Ulm", "Bonn", "Lyon", "New York", "Karl Marx", "Ada King"]


def sentence(draw, facts):
    """A first word, then the facts among words that are none."""
    words = draw.choices(WORDS, k=draw.randint(8, 16))
    for fact in facts:
        words.insert(draw.randint(0, len(words)), draw.choice(["{}", "({})", "{},"]).format(fact))
    return f"{draw.choice(['The', 'Ulm', 'Lyon'])} {' '.join(words)}."


def passages(draw):
    """Sentences with a year, a number and a name each, and some that are of no use."""
    some = [(draw.randint(1900, 1960), draw.randint(2, 99), draw.choice(NAMES)) for _ in range(60)]
    useless = [sentence(draw, [1950, 1951, 7, 8, "Ulm", "Bonn"]), "Short in 1950 with 3 in Ulm."]
    return [*(sentence(draw, facts) for facts in some), *useless]


def make(texts, folder, *, name="claims", kind="year", **changes):
    folder.mkdir(exist_ok=True)
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts))
    corpus = open_corpus(CorpusArguments(corpus=str(folder / "texts.txt")), folder / "artifacts")
    sizes = dict(zip(("num_train", "num_dev", "num_test"), SPLITS.values(), strict=True))
    args = ClaimsArguments(kind=kind, output_dir=str(folder / name), **{**sizes, **changes})
    return make_claims(corpus, args)


def read(made):
    """Its claims by split, and the lines of its corpus."""
    files = {split: (made.folder / f"{split}.jsonl").read_text() for split in SPLITS}
    claims = {split: [*map(json.loads, text.splitlines())] for split, text in files.items()}
    return claims, (made.folder / "corpus.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "kind", "fact"),
    [
        ("He was born in Ulm (1925) and studied law at school.", "year", "1925"),
        ("He was born in Ulm (1925\u20131990) and studied law at school.", "year", None),
        ("In 1925 a sum of $1,200.50 was paid to him for it.", "number", "1,200.50"),
        ("Paris is one of the cities that Karl Marx's family knew.", "entity", "Karl Marx"),
        ("Paris is one of the cities that Karl, Marx\u2019s father, knew.", "entity", None),
        ("Paris is one of the cities that some people of Paris knew.", "entity", None),
        ("Parisian people are few in the streets of old Paris now.", "entity", "Paris"),
        ("Karl Marx was one of those who knew the city well.", "entity", None),
        (" ".join(["in 1925", *["word"] * 23]), "year", None),
    ],
)
def test_a_sentence_has_a_fact_where_it_holds_just_one_and_all_of_it(words, kind, fact):
    found = find_fact(words.split(), kind)
    assert (found and found.text) == fact


@settings(max_examples=12)
@given(st.integers(0, 99), st.sampled_from(KINDS), st.sampled_from([0.05, 0.5, 0.65, 1.0]))
def test_a_claim_is_its_source_with_its_fact_or_another(tmp_path_factory, seed, kind, keep):
    texts = passages(random.Random(seed))
    made = make(texts, tmp_path_factory.mktemp("made"), kind=kind, keep_words=keep, seed=seed)
    claims, corpus = read(made)
    assert corpus == texts
    for split, size in SPLITS.items():
        assert [claim["id"] for claim in claims[split]] == [f"{split}-{i}" for i in range(size)]
        assert [claim["label"] for claim in claims[split]].count("false") == size // 2
    every = [claim for split in claims.values() for claim in split]
    assert len({claim["source"] for claim in every}) == len({c["text"] for c in every}) == 17
    for claim in every:
        fact, written = claim["fact"], claim["written"]
        assert texts[claim["source"]] == claim["sentence"]
        assert (fact == written) == (claim["label"] == "true")
        told = re.sub(rf"(?<!\w){re.escape(written)}(?!\w)", fact, claim["text"], count=1)
        words, source = told.split(), claim["sentence"].split()
        rest = iter(source)
        assert all(word in rest for word in words)
        kept, others = len(words) - len(fact.split()), len(source) - len(fact.split())
        assert kept == round(keep * others)
        if kind == "year" and fact != written:
            assert 3 <= abs(int(fact) - int(written)) <= 17
            assert 1900 <= int(written) <= 1960
        elif kind == "number":
            assert len(fact) == len(written)
        elif kind == "entity":
            assert claim["sentence"].count(fact) == 1
            assert claim["sentence"].count(written) == (fact == written)
            assert written in NAMES
            assert len(fact.split()) == len(written.split())


def test_the_same_arguments_give_the_same_claims(tmp_path):
    texts = passages(random.Random(1))
    names = {"one": {}, "two": {}, "seed": {"seed": 1}, "more": {"num_train": 20}}
    made = {name: make(texts, tmp_path, name=name, **changes) for name, changes in names.items()}
    claims = {name: read(one)[0] for name, one in made.items()}
    assert claims["one"] == claims["two"] != claims["seed"]
    assert claims["more"]["test"] == claims["one"]["test"]


def test_near_copies_with_the_fact_go_with_their_source(tmp_path):
    words = "in {} the old mayor of a small town opened some new bridges {}"
    same = [words.format(1925, end) for end in ("there", "there!", "There.")]
    other = words.format(1935, "there")
    texts = [*same, other, *passages(random.Random(2))]
    made = make(texts, tmp_path, source_share=0, num_train=45, num_dev=2, num_test=2)
    claims, corpus = read(made)
    drawn = [c["source"] for c in claims["train"] if c["source"] < 4]
    assert len([row for row in drawn if row < 3]) <= 1
    assert (same[0] in corpus) == (same[1] in corpus) == (same[2] in corpus) == (min(drawn) > 2)
    assert (other in corpus) == (3 not in drawn)
    assert drawn
