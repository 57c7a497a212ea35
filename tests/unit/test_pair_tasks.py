"""Tasks of two fields, and what a passage is to them.

The rule: stage 1 searches with both fields side by side, in the order of `inputs`; a passage fills
the first input and leaves the other empty, so that it has one state for all queries.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import SENTENCES, with_rerank, write_jsonl

from pgra.config import DataArguments, config_root, read_yaml
from pgra.core import ALONE, Context
from pgra.data.examples import load_splits
from pgra.data.tasks import load_task
from pgra.errors import ConfigError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.pgra import reader_template
from pgra.methods.stages import Stages, prompt_template
from pgra.retrieval import open_retriever

PAIRS = ("mrpc", "qnli", "rte")
PAIR = {
    "sentence1": "The boats came home.",
    "sentence2": "The sea was calm.",
    "sentence": "Main flows through Frankfurt.",
    "question": "What flows through Frankfurt?",
}
PASSAGE = "Red apples grow."
SHOWN = {
    "mrpc": (
        'Are the following two sentences "equivalent" or "not equivalent"?\n'
        "The boats came home.\nThe sea was calm."
    ),
    "qnli": (
        'Does the sentence hold the answer to the question, "yes" or "no"?\n'
        "Main flows through Frankfurt.\nWhat flows through Frankfurt?"
    ),
    "rte": (
        'Does the second sentence follow from the first, "yes" or "no"?\n'
        "The boats came home.\nThe sea was calm."
    ),
}


def fields_of(task):
    return {name: PAIR[name] for name in task.inputs}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_shown_in_two_lines_and_a_passage_alone(name):
    task = load_task(name)
    template = prompt_template(task)
    assert template.render(fields_of(task)) == SHOWN[name]
    question = SHOWN[name].splitlines()[0]
    passage = template.passage_fields(PASSAGE)
    assert template.render_query(passage, after_prefix=True) == (
        f"\n\n{question}\n{PASSAGE}\nThe answer is"
    )


def pair_rows(count):
    return [
        {
            "sentence1": SENTENCES[i % 12],
            "sentence2": f"{SENTENCES[(i * 5 + 1) % 12]} Number {i}.",
            "label": "entailment" if i % 2 else "not_entailment",
        }
        for i in range(count)
    ]


@pytest.fixture
def pair_args(args, tmp_path):
    train = write_jsonl(tmp_path / "pairs.jsonl", pair_rows(30))
    test = write_jsonl(tmp_path / "pairs-test.jsonl", pair_rows(37)[30:])
    data = DataArguments(task="rte", train_file=str(train), test_file=str(test))
    return with_rerank(replace(args, data=data), num_exemplars=2)


def test_the_official_template_is_refused_for_a_pair(pair_args):
    task = load_task("rte")
    one_text = read_yaml(config_root() / "profiles" / "official.yaml")["reader_template"]
    reader = replace(pair_args.reader, reader_template=one_text)
    own = re.escape("--reader_template '{sentence1} ? <extra_id_0> , {sentence2}'")
    with pytest.raises(ConfigError, match=f"does not fit task 'rte': .*'text'.* own.*: {own}$"):
        reader_template(task, reader)
    own_words = replace(reader, reader_template=task.reader_template)  # the way out
    assert reader_template(task, own_words) == task.reader_template
    assert reader_template(load_task("sst2"), reader) == one_text  # the control: one text


def test_stage_1_searches_once_with_both_fields(pair_args):
    found = Stages.read(pair_args, ALONE)
    found.find()
    retriever = open_retriever(
        pair_args.retriever, found.corpus, Context(artifacts=pair_args.artifacts, device="cpu")
    )
    joined = [
        f"{e.fields['sentence1']} {e.fields['sentence2']}" for e in found.data.examples("test")
    ]
    rows = found.candidates["test"].candidates.rows
    np.testing.assert_array_equal(retriever.retrieve(joined, 6).rows, rows)
    firsts = [example.fields["sentence1"] for example in found.data.examples("test")]
    assert (retriever.retrieve(firsts, 6).rows != rows).any()  # the control: one field alone


def test_stage_2_compares_the_pair_with_each_passage_alone(pair_args):
    found = Stages.read(pair_args, ALONE)
    found.find()
    encoder = PromptedEncoder(CausalLM.from_name(pair_args.rerank.lm), found.prompt)
    examples = found.data.examples("test")
    queries = encoder.encode_fields([example.fields for example in examples]).numpy()
    passages = encoder.encode(SENTENCES).numpy()
    best = found.evidence["test"].candidates
    expected = np.take_along_axis(queries @ passages.T, best.rows, axis=1)
    np.testing.assert_allclose(best.scores, expected, rtol=1e-4)
    assert (np.diff(best.scores, axis=1) <= 0).all()
    half = encoder.encode([example.fields["sentence1"] for example in examples]).numpy()
    other = np.take_along_axis(half @ passages.T, best.rows, axis=1)
    assert np.abs(other - expected).max() > 1e-3  # the control: the second field counts


CLAIMS = [
    {"id": 1, "claim": "The Main flows through Frankfurt.", "label": "SUPPORTS", "evidence": [[1]]},
    {"id": 2, "claim": "Apples are blue.", "label": "REFUTES", "evidence": [[2]]},
    {"id": 3, "claim": "Someone once sang.", "label": "NOT ENOUGH INFO", "evidence": [[3]]},
    {"id": 4, "claim": "The sea is dry.", "label": "REFUTES", "evidence": [[4]]},
]


def test_fevers_own_files_are_read_without_claims_that_have_no_verdict(tmp_path, caplog):
    write_jsonl(tmp_path / "train.jsonl", CLAIMS * 5)
    write_jsonl(tmp_path / "shared_task_dev.jsonl", CLAIMS)
    task = load_task("fever")
    with caplog.at_level("INFO", "pgra"):
        splits = load_splits(task, DataArguments(dataset_name=str(tmp_path)))
    assert [(e.id, e.label) for e in splits.test] == [
        ("test-0", "SUPPORTS"),
        ("test-1", "REFUTES"),
        ("test-3", "REFUTES"),  # its row, though one before it was left out
    ]
    assert len(splits.train) + len(splits.dev) == 15
    assert splits.notes["ignored_rows"] == {"train": 5, "test": 1}
    assert "1 rows labelled NOT ENOUGH INFO were left out" in caplog.text
