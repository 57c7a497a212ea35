from dataclasses import replace

import numpy as np
import pytest
from conftest import SENTENCES, with_rerank, with_retriever, write_jsonl

from pgra.config import DataArguments, RuntimeArguments
from pgra.core import MISSING_ROW, Context, Worker
from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.methods.pgra import find_evidence, read_task
from pgra.report.results import read_object
from pgra.rerank.similarity import SIMILARITIES
from pgra.run_folder import check_same_run, check_writable, load_run_arguments


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


def test_exhaustive_is_the_two_stages_with_all_passages_as_candidates(args):
    for similarity in SIMILARITIES:
        args = with_rerank(args, similarity=similarity)
        staged = found_for(with_retriever(args, num_candidates=len(SENTENCES)))
        found = found_for(with_retriever(args, retriever="exhaustive"))
        few = found_for(with_retriever(args, num_candidates=5))
        for split in ("train", "dev", "test"):
            ours, theirs = (f.evidence[split].candidates for f in (found, staged))
            np.testing.assert_array_equal(ours.rows, theirs.rows, err_msg=similarity)
            np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-5, err_msg=similarity)
            control = few.evidence[split].candidates
            assert (control.top(3).rows != ours.top(3).rows).any(), similarity


def test_exhaustive_needs_no_first_stage_whatever_k_is(args, tmp_path):
    args = with_retriever(args, encoder="no-such-folder", num_candidates=1, retriever="exhaustive")
    found = found_for(args)
    assert {path.name for path in (tmp_path / "artifacts").iterdir()} == {
        *("corpora", "banks", "evidence")
    }
    assert set(found.seconds) == {"corpus", "states", "evidence"}
    assert {"evidence/train", "evidence/dev", "evidence/test"} <= set(found.fingerprints)
    best = found.evidence["test"].candidates
    for query, lines in enumerate(found.evidence_lines("test")):
        assert [line.row for line in lines] == best.rows[query, :3].tolist()
        assert [line.stage1_rank for line in lines] == [1, 2, 3]
        assert all(line.stage1_score == line.score for line in lines)
    with pytest.raises(ModelError, match="no-such-folder"):  # the control: it needs an encoder
        found_for(with_retriever(args, retriever="dense", num_candidates=6))


def test_a_second_experiment_runs_the_lm_on_nothing(args, caplog, monkeypatch):
    caplog.set_level("INFO")
    queries = 32 + 4 + 12
    found_for(args)
    read = len(np.unique(np.concatenate([r.ravel() for r in candidate_rows(found_for(args))])))
    told = [record.getMessage() for record in caplog.records if "LM forwards" in record.message]
    assert told[0].startswith(f"reranker: {queries * 6} query-candidate pairs; {read + queries} LM")
    assert told[1].endswith("0 LM forwards: every state was there already (reused)")
    caplog.clear()
    exhaustive = with_retriever(args, retriever="exhaustive")
    found_for(exhaustive)
    pairs = queries * len(SENTENCES)
    begin = f"exhaustive: {pairs} query-passage pairs; {len(SENTENCES) - read} LM forwards"
    assert any(record.getMessage().startswith(begin) for record in caplog.records)

    def refuse(*_args, **_kwargs):
        raise AssertionError("the LM was loaded")

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", refuse)
    caplog.clear()
    again = found_for(with_rerank(exhaustive, num_evidence=5))  # another d: the same product
    assert all(stored.reused for stored in again.evidence.values())
    assert [len(lines) for lines in again.evidence_lines("test")] == [5] * 12
    assert any("0 LM forwards" in record.getMessage() for record in caplog.records)
    other = found_for(with_rerank(exhaustive, similarity="cosine"))
    assert not any(stored.reused for stored in other.evidence.values())


def candidate_rows(found):
    return [stored.candidates.rows for stored in found.candidates.values()]


def test_exhaustive_by_an_index_says_its_recall(args):
    found = found_for(with_retriever(args, retriever="exhaustive", index_factory="HNSW8"))
    for split in ("train", "dev", "test"):
        manifest = read_object(found.evidence[split].folder / "manifest.json")
        assert set(manifest["counts"]["recall"]) == {"10", "12"}
        assert 0 < manifest["counts"]["recall"]["12"] <= 1
        assert (manifest["counts"]["queries"], manifest["counts"]["candidates"]) == (
            *(len(found.examples(split)), 12),
        )
    exact = found_for(with_retriever(args, retriever="exhaustive"))
    assert exact.evidence["test"].folder != found.evidence["test"].folder


@pytest.mark.parametrize("similarity", ["dot", "label_words"])
def test_two_processes_search_everything_as_one_does(args, tmp_path, similarity):
    from threading import Barrier, Thread

    args = with_retriever(with_rerank(args, similarity=similarity), retriever="exhaustive")
    alone = found_for(args)
    runtime = RuntimeArguments(artifacts_dir=str(tmp_path / "both"), device="cpu")
    both, found = Barrier(2, timeout=60), {}

    def work(rank):
        found[rank] = read_task(args)
        context = Context(Worker(rank, 2), lambda: both.wait() and None)
        find_evidence(found[rank], replace(args, runtime=runtime), context)

    threads = [Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        for split in ("train", "dev", "test"):
            ours = found[rank].evidence[split].candidates
            np.testing.assert_array_equal(ours.rows, alone.evidence[split].candidates.rows)


@pytest.mark.parametrize(
    ("changes", "method"),
    [({}, "pgra"), ({"reranker": "none"}, "fid"), ({"num_evidence": 0}, "t5")],
)
def test_methods_have_short_names(args, changes, method):
    assert with_rerank(args, **changes).method == method


def test_a_search_of_everything_has_a_name_of_its_own(args):
    exhaustive = with_retriever(args, retriever="exhaustive")
    assert exhaustive.method == "pgra-exhaustive"
    assert with_rerank(exhaustive, num_evidence=0).method == "t5"


def test_contradictions_are_refused(args):
    with pytest.raises(ConfigError, match="num_evidence .7. exceeds num_candidates .6."):
        with_rerank(args, num_evidence=7)
    exhaustive = with_retriever(args, retriever="exhaustive")
    with_rerank(exhaustive, num_evidence=0, reranker="none")  # the plain reader
    with pytest.raises(ConfigError, match="reranker 'none' has none: use --reranker prompted"):
        with_rerank(exhaustive, reranker="none")
    with pytest.raises(ConfigError, match="index_dir .there. names a first stage's index"):
        with_retriever(exhaustive, index_dir="there")
    with pytest.raises(ConfigError, match="num_evidence .13. exceeds the corpus .12 passages"):
        found_for(with_rerank(exhaustive, num_evidence=13))
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
    with pytest.raises(ArtifactError, match="is damaged .*: delete .* and run its command again"):
        read_object(tmp_path / "none.json")
