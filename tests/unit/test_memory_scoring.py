"""Scores of outputs in a file, in the columns of the paper's release; the outputs are our own."""

import json

import pytest

from pgra.cli import main
from pgra.errors import DataError
from pgra.memory.families import load_family
from pgra.memory.stream import score_file

LEXICAL = load_family("lexical")
# Of the first column syn 1 of 2, sent 2 (1 with a bracket) of 2, hom 0 of 1; of the second all.
RESULTS = """\
question,gold,GPT-3 generated,with_mem_learned_ir generated
What is like < fog > ?,the synonym for fog is mist,the synonym for fog is haze,the synonym for fog \
is mist
What is akin to < sea > ?,the synonym for sea is ocean,the homonym for sea is see,"the SYNONYM for \
sea is water, or ocean"
make something with < cup > ?,a sentence with cup is: the cup fell,a sentence with cup is: the cup \
broke,a sentence with cup is: the [ cup ] fell
< net > can be used how ?,a sentence with net is: a net of gold,a sentence with net is: the \
[ net ],"a sentence with net is: a [ net ] of ""gold"" leaf"
what has a < bear > like ring to it ?,the homonym for bear is bare,a word like bear is bare,the \
homonym for bear is bare
"""


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(RESULTS)
    return path


def test_outputs_of_two_systems_are_scored_as_worked_out_by_hand(results):
    bare, memory = score_file(results, LEXICAL)
    assert bare.column == "GPT-3 generated"
    assert bare.counts == {"syn": 2, "hom": 1, "sent": 2, "all": 5}
    assert bare.understood == {"syn": 0.5, "hom": 0.0, "sent": 1.0, "all": 0.6}
    assert bare.answered == 0.0
    assert memory.understood == {"syn": 1.0, "hom": 1.0, "sent": 1.0, "all": 1.0}
    assert memory.answered == 0.4  # mist, bare; a bracket is no answer that was expected


def test_the_releases_rule_asks_a_sentence_for_a_bracket(results):
    bare, memory = score_file(results, LEXICAL, as_released=True)
    assert bare.understood == {"syn": 0.5, "hom": 0.0, "sent": 0.5, "all": 0.4}
    assert memory.understood["sent"] == 1.0


def test_a_run_of_ours_is_scored_from_its_steps(tmp_path):
    path = tmp_path / "steps.jsonl"
    row = {"kind": "syn", "expected": "the synonym for fog is mist", "generated": "the synonym"}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"generated": row["expected"]}))
    (scored,) = score_file(path, LEXICAL)
    assert (scored.understood["all"], scored.answered) == (1.0, 0.5)


def test_situations_are_scored_by_category_and_label(tmp_path):
    path = tmp_path / "ert.jsonl"
    gold = "This question is about: care. The answer is GOOD."
    outputs = [gold, gold.replace("GOOD", "BAD"), gold.replace("care", "harm"), "no"]
    rows = [{"type": "care", "gold": gold, "generated": output} for output in outputs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (scored,) = score_file(path, load_family("ert_cat"))
    assert scored.understood == {"care": 0.5, "all": 0.5}
    assert scored.answered == 0.5
    (ruled,) = score_file(path, load_family("ert_nl"))
    assert ruled.counts == {"situation": 4, "all": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gold,generated\n", "holds no row of outputs"),
        ("gold,output\nthe synonym for a is b,x\n", "its column's name must end in 'generated'"),
        ("answer,generated\na,b\n", "line 2 has none of gold, expected, expected_answer"),
        ("gold,generated\nthe sense of a is b,c\n", "is of no type of the family 'lexical'"),
        ("gold,generated\nthe synonym for a is b,c,d\n", "line 2: 3 cells under a header of 2"),
    ],
)
def test_a_file_that_cannot_be_scored_is_refused(tmp_path, text, message):
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        score_file(path, LEXICAL)


def test_rows_without_a_column_that_others_have_are_refused(tmp_path):
    row = {"gold": "the synonym for a is b", "x generated": "c"}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"y generated": "d"}))
    with pytest.raises(DataError, match="not every row has every output column: x generated, y"):
        score_file(path, LEXICAL)


def test_the_command_shows_a_column_a_line(results, capsys):
    assert main(["memory", "score", str(results), "--released_check"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2] == "| outputs | 2 | 1 | 2 | 5 |  |"
    assert out[3] == "| GPT-3 generated | 0.500 | 0.000 | 0.500 | 0.400 | 0.000 |"
    assert out[4].startswith("| with_mem_learned_ir generated | 1.000 | 1.000 | 1.000 | 1.000 ")
    assert main(["memory", "score"]) == 2
    assert "no file of outputs is named" in capsys.readouterr().err
    assert main(["memory", "score", str(results), "--family", "webquestions"]) == 2
    assert "has no understanding to score" in capsys.readouterr().err
