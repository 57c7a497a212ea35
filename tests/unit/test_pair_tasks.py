"""Tasks of two fields, and what a passage is to them.

The rule: stage 1 searches with both fields side by side, in the order of `inputs`; a passage fills
the first input and leaves the other empty, so that it has one state for all queries.
"""

import numpy as np
from conftest import SENTENCES, with_rerank, write_jsonl

from pgra.context import ALONE
from pgra.data.examples import DataArguments
from pgra.data.tasks import Task
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.stages import Stages
from pgra.prompts import prompt_template
from pgra.retrieval import open_retriever

PASSAGE = "Red apples grow."


def test_a_pair_is_shown_in_two_lines_and_a_passage_alone():
    template = prompt_template(Task.load("rte"))
    pair = {"sentence1": "The boats came home.", "sentence2": "The sea was calm."}
    question, *lines = template.render(pair).split("\n")
    assert question.endswith("?")
    assert lines == list(pair.values())
    passage = template.passage_fields(PASSAGE)
    assert template.render_query(passage, after_prefix=True) == (
        f"\n\n{question}\n{PASSAGE}\nThe answer is"
    )


def test_both_fields_search_and_are_compared_with_each_passage_alone(args, tmp_path):
    pairs = [(SENTENCES[i % 12], f"{SENTENCES[(i * 5 + 1) % 12]} Number {i}.") for i in range(37)]
    label = Task.load("rte").labels[0]
    rows = [{"sentence1": a, "sentence2": b, "label": label} for a, b in pairs]
    train = write_jsonl(tmp_path / "pairs.jsonl", rows[:30])
    test = write_jsonl(tmp_path / "pairs-test.jsonl", rows[30:])
    data = DataArguments(task="rte", train_file=str(train), test_file=str(test))
    pair_args = with_rerank(
        args.having(data=data), num_exemplars=2, exemplars="random", similarity="dot"
    )
    found = Stages.read(pair_args, ALONE)
    found.find()
    retriever = open_retriever(pair_args.retriever, found.corpus, found.context)
    examples = found.data.examples("test")
    firsts = [example.fields["sentence1"] for example in examples]
    joined = [f"{e.fields['sentence1']} {e.fields['sentence2']}" for e in examples]
    rows = found.candidates["test"].candidates.rows
    np.testing.assert_array_equal(retriever.retrieve(joined, 6).rows, rows)
    assert (retriever.retrieve(firsts, 6).rows != rows).any()  # the control: one field alone

    encoder = PromptedEncoder(CausalLM(pair_args.rerank.lm), found.prompt)
    queries = encoder.encode_examples(examples)
    passages = encoder.encode(SENTENCES).numpy()
    best = found.evidence["test"].candidates
    expected = np.take_along_axis(queries @ passages.T, best.rows, axis=1)
    np.testing.assert_allclose(best.scores, expected, rtol=1e-4)
    other = np.take_along_axis(encoder.encode(firsts).numpy() @ passages.T, best.rows, axis=1)
    assert np.abs(other - expected).max() > 1e-3  # the control: the second field counts
