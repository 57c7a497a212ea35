from dataclasses import replace

import numpy as np
import pytest
from conftest import SENTENCES, write_jsonl

from pgra.config import (
    CorpusArguments,
    DataArguments,
    PgraArguments,
    ReaderArguments,
    RerankArguments,
    RetrieverArguments,
    RuntimeArguments,
)
from pgra.errors import ArtifactError, ConfigError
from pgra.pipelines.pgra import find_evidence, read_task
from pgra.pipelines.run_folder import check_same_run, check_writable, load_run_arguments, read_json
from pgra.types import MISSING_ROW


@pytest.fixture
def args(tmp_path, review_files, corpus_file, encoder_dir, lm_dirs, t5_dir):
    return PgraArguments(
        runtime=RuntimeArguments(artifacts_dir=str(tmp_path / "artifacts"), device="cpu"),
        data=DataArguments(
            task="sst2",
            train_file=str(review_files["train"]),
            test_file=str(review_files["test"]),
        ),
        corpus=CorpusArguments(corpus=str(corpus_file)),
        retriever=RetrieverArguments(encoder=str(encoder_dir), num_candidates=6),
        rerank=RerankArguments(lm=str(lm_dirs["gpt2"]), num_evidence=3, num_exemplars=4),
        reader=ReaderArguments(model_name_or_path=str(t5_dir)),
    )


def with_rerank(args, **changes):
    return replace(args, rerank=replace(args.rerank, **changes))


def found_for(args):
    found = read_task(args)
    find_evidence(found, args)
    return found


def test_exemplars_stand_in_the_prompt_and_not_in_train(args):
    found = read_task(args)
    shown = set(found.prompt.exemplar_ids)
    assert len(shown) == 4
    assert shown.isdisjoint(example.id for example in found.splits.train)
    assert len(found.splits.train) == 36 - 4
    assert shown.isdisjoint(example.id for example in found.splits.dev)


def test_readers_without_a_prompt_train_on_the_same_examples(args):
    plain = read_task(with_rerank(args, num_evidence=0, reranker="none"))
    assert plain.splits.train == read_task(args).splits.train
    other = read_task(with_rerank(args, exemplar_seed=1))
    assert other.splits.train != plain.splits.train  # the control


def test_evidence_is_the_best_of_the_candidates(args):
    found = found_for(args)
    for split, queries in (("train", 32), ("dev", 4), ("test", 12)):
        first, second = found.candidates[split].candidates, found.evidence[split].candidates
        assert first.rows.shape == second.rows.shape == (queries, 6)
        np.testing.assert_array_equal(np.sort(first.rows), np.sort(second.rows))
        assert (np.diff(second.scores, axis=1) <= 0).all()
        texts = found.evidence_texts(split)
        assert [len(line) for line in texts] == [3] * queries
        assert texts[0] == [SENTENCES[row] for row in second.rows[0, :3]]
    assert (
        found.evidence["test"].candidates.rows != found.candidates["test"].candidates.rows
    ).any()


def test_lines_tell_both_stages(args):
    found = found_for(args)
    first = found.candidates["test"].candidates
    for query, lines in enumerate(found.evidence_lines("test")):
        for line in lines:
            assert first.rows[query, line.stage1_rank - 1] == line.row
            assert first.scores[query, line.stage1_rank - 1] == pytest.approx(line.stage1_score)


def test_fewer_matches_than_candidates_leave_lines_out(args, corpus_file):
    """BM25 gives no row that shares no word: 'zebra' is in one passage only."""
    corpus_file.write_text("\n".join([*SENTENCES, "A zebra."]) + "\n")
    other = write_jsonl(corpus_file.parent / "zebra.jsonl", [{"text": "zebra", "label": 1}])
    args = replace(
        args,
        data=replace(args.data, test_file=str(other)),
        retriever=replace(args.retriever, retriever="bm25"),
    )
    found = found_for(args)
    assert (found.candidates["test"].candidates.rows[0, 1:] == MISSING_ROW).all()
    assert found.evidence_texts("test") == [["A zebra."]]


def test_no_evidence_opens_nothing(args, tmp_path):
    found = found_for(with_rerank(args, num_evidence=0))
    assert found.corpus is None
    assert found.evidence_texts("test") == [[]] * 12
    assert not (tmp_path / "artifacts").exists()


def test_a_second_look_reuses_what_is_there(args):
    found_for(args)
    again = found_for(args)
    assert all(stored.reused for stored in again.candidates.values())
    assert all(stored.reused for stored in again.evidence.values())
    fewer = found_for(with_rerank(args, num_evidence=1))
    assert all(stored.reused for stored in fewer.evidence.values())  # d is cut from what is stored
    cosine = found_for(with_rerank(args, similarity="cosine"))
    assert not any(stored.reused for stored in cosine.evidence.values())


@pytest.mark.parametrize(
    ("changes", "method"),
    [({}, "pgra"), ({"reranker": "none"}, "fid"), ({"num_evidence": 0}, "t5")],
)
def test_methods_have_short_names(args, changes, method):
    assert with_rerank(args, **changes).method == method


def test_contradictions_are_refused(args):
    with pytest.raises(ConfigError, match="num_evidence .7. exceeds num_candidates .6."):
        with_rerank(args, num_evidence=7)
    with pytest.raises(ConfigError, match="--task is missing"):
        read_task(replace(args, data=DataArguments()))
    with pytest.raises(ConfigError, match="all 36 training examples stand in the prompt"):
        read_task(with_rerank(args, num_exemplars=36))


def test_a_folder_that_can_be_written_is_not_made(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(NotADirectoryError, match="file"):
            check_writable(path)


def test_a_run_is_known_by_what_decides_it(tmp_path):
    check_same_run(tmp_path / "new", {"seed": 1})
    (tmp_path / "run.json").write_text('{"seed": 1, "evidence/test": "ab"}')
    check_same_run(tmp_path, {"seed": 2})  # nothing was trained there yet
    (tmp_path / "reader").mkdir()
    check_same_run(tmp_path, {"seed": 1}, is_whole=False)
    with pytest.raises(ArtifactError, match="with seed 1, this run asks for 2: choose another"):
        check_same_run(tmp_path, {"seed": 2}, is_whole=False)
    with pytest.raises(ArtifactError, match='with evidence/test "ab", this run asks for null'):
        check_same_run(tmp_path, {"seed": 1})


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="holds no trained reader: give the folder"):
        load_run_arguments(tmp_path, {})
    with pytest.raises(ArtifactError, match="is damaged .*: delete .* and run train.py again"):
        read_json(tmp_path / "none.json")
