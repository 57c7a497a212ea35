"""Exact match is SQuAD's, BLEU sacrebleu's; PARENT is worked by hand, and falls where it must."""

import math

import numpy as np
import pytest
import sacrebleu

from pgra.data.answers import AnsweredExample, Table
from pgra.data.text import normalize_answer
from pgra.report import metrics
from pgra.report.metrics import (
    bleu_counts,
    bleu_of_counts,
    f1,
    has_answer,
    is_exact_match,
    tokenize,
)

TABLE = ["Ann Lee", "1925", "Paris"]


def parent(text, references=("Ann Lee was born in 1925 .",), values=TABLE, chosen=TABLE[:2]):
    return metrics.parent_scores(text, references, values, chosen)


def bleu(texts, references, **how):
    examples = [AnsweredExample("", {}, answers=tuple(some), **how) for some in references]
    return bleu_of_counts(np.sum(bleu_counts(texts, examples), axis=0).tolist())


def mean(*values):
    return math.prod(values) ** (1 / len(values))


def test_bleu_is_sacrebleus_with_any_number_of_references():
    texts = ["The cat sat on the mat.", "A dog barks at night"]
    references = [["The cat sat on a mat.", "A cat was on the mat."], ["The dog barks at night."]]
    streams = [
        ["The cat sat on a mat.", "The dog barks at night."],
        ["A cat was on the mat.", None],
    ]
    expected = sacrebleu.corpus_bleu(texts, streams).score / 100
    assert bleu(texts, references) == pytest.approx(expected)
    assert 0 < expected < 1
    assert tokenize("Ann Lee's 1,925 cats.") == ("ann", "lee's", "1,925", "cats", ".")
    assert bleu(["THE CAT SAT ON A MAT."], references[:1]) < 0.5
    assert bleu(["THE CAT SAT ON A MAT."], references[:1], table=Table("", [], [])) > 0.999


def test_precision_counts_what_the_table_says_beside_the_reference():
    # Words: ann lee was born in paris; all but paris are the reference's, and paris is the table's.
    # Pairs: 4 of 5 are the reference's, and half of (in paris) is the table's; three words: 3 of 4
    # and a third of (born in paris); four: 2 of 3 and a quarter of (was born in paris).
    precision = mean(1, 4.5 / 5, (3 + 1 / 3) / 4, (2 + 1 / 4) / 3)
    # The reference has 7 words, 3 of them in the table (ann, lee, 1925), 2 of these told. Pairs:
    # (ann lee) 1, (lee was) 1/2, (in 1925) 1/2, (1925 .) 1/2; told are the first two: 1.5 of 2.5.
    # Three: (ann lee was) 2/3, (lee was born) 1/3, (born in 1925) 1/3, (in 1925 .) 1/3; 1 of 5/3.
    # Four: 2/4, 1/4 told; (was born in 1925) 1/4, (born in 1925 .) 1/4 not: 3/4 of 5/4.
    of_reference = mean(2 / 3, 1.5 / 2.5, 1 / (5 / 3), 0.75 / 1.25)
    # The reference tells both chosen values whole: the table's own recall has no weight.
    found = parent("Ann Lee was born in Paris")
    assert found == pytest.approx((precision, of_reference))
    unsupported = parent("Ann Lee was born in London")  # the control
    assert unsupported == pytest.approx((mean(5 / 6, 4 / 5, 3 / 4, 2 / 3), of_reference))


def test_recall_turns_to_the_table_where_the_reference_leaves_it_untold():
    # The reference tells ann lee whole and 1925 not: 1/2, so both recalls weigh half. The sentence
    # tells lee, of ann lee, and 1925 whole: (1/2 + 1) / 2. The reference's words: ann and lee
    # follow, of which lee is told: 1/2. Pairs: (ann lee) 1 and (lee sang) 1/2, neither told, and
    # (ann lee sang) with nothing longer: small in place of both zeros, 1 where there is none.
    found = parent("1925 lee", references=["Ann Lee sang"])
    of_reference = mean(1 / 2, 1e-5, 1e-5, 1)
    recall = math.sqrt(of_reference * 0.75)
    assert found == pytest.approx((mean(1, 1, 1e-5, 1e-5), recall))


def test_normalising_is_squads_and_any_alias_is_right():
    plain = {"The  Beatles": "beatles", "U.S.A.": "usa", "an apple a day": "apple day"}
    plain |= {" New\nYork ": "new york", "“quoted”": "“quoted”"}  # ASCII marks only, as officially
    assert {text: normalize_answer(text) for text in plain} == plain
    answers = ["Sunset Blvd", "Sunset Boulevard"]
    assert is_exact_match(" the Sunset Boulevard.", answers)
    assert not is_exact_match("Sunset", answers)
    two = AnsweredExample("", {}, answers=("no", "the red car"))
    assert f1("a big red car", two) == pytest.approx(0.8)  # 2 of 3, 2 of 2


def test_an_answer_stands_in_a_passage_as_whole_tokens_in_a_row():
    assert has_answer("The river flows through FRANKFURT, to New  York.", ["x", "frankfurt"])
    assert has_answer("Beyonce\u0301 sang it in the U.S.A.", ["Beyoncé"])
    assert has_answer("in the U.S.A.", ["u.s.a"])
    assert not has_answer("He met a Frankfurter.", ["Frankfurt"])
    assert not has_answer("New and old York", ["New York"])
    assert not has_answer("किताब", ["क"])  # vowel signs are no edges of words
    assert has_answer("एक किताब।", ["किताब"])
