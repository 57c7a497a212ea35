"""Both retrieval stages on a task: what they find, share, store and refuse."""

import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from conftest import SENTENCES, with_rerank, with_retriever, write_jsonl
from method_runs import run_of

from pgra.artifacts import write_json
from pgra.core import ALONE, MISSING_ROW, Context, Worker
from pgra.errors import ArtifactError, ConfigError
from pgra.lm.causal_lm import CausalLM
from pgra.methods import pgra as methods
from pgra.methods.arguments import RuntimeArguments
from pgra.methods.base import SPLITS
from pgra.methods.stages import Stages
from pgra.rerank.similarity import SIMILARITIES
from pgra.run_folder import check_same_run
from pgra.runs import run

pytestmark = pytest.mark.slow


def found_for(args, splits=SPLITS, context=ALONE):
    stages = Stages.read(args, context)
    stages.find(splits)
    return stages


def test_what_stands_in_a_prompt_that_is_read_is_not_trained_on(args):
    stages = Stages.read(args, ALONE)
    shown = set(stages.prompt.exemplar_ids)
    assert len(shown) == 4
    assert shown.isdisjoint(e.id for e in (*stages.data.train, *stages.data.dev))
    assert len(stages.data.train) == 36 - 4
    other = Stages.read(with_rerank(args, exemplar_seed=1), ALONE)  # the control
    assert other.data.train != stages.data.train


@pytest.mark.parametrize("method", ["plain", "fid", "random", "rag", "knn", "cross-encoder"])
def test_a_method_without_a_prompt_trains_on_all_unless_it_is_a_control(args, method):
    shown = Stages.read(args, ALONE)
    if method == "cross-encoder":
        mine = with_rerank(args, reranker=method)
    else:
        mine = replace(args, runtime=replace(args.runtime, method=method))
    whole = Stages.read(mine, ALONE)
    assert len(whole.data.train) == 36
    same = Stages.read(replace(mine, reader=replace(mine.reader, same_train=True)), ALONE)
    assert same.data.train == shown.data.train != whole.data.train
    assert same.fingerprints["train"] == shown.fingerprints["train"] != whole.fingerprints["train"]
    assert same.prompt.exemplar_ids == whole.prompt.exemplar_ids == ()
    more = with_rerank(mine, num_exemplars=36)  # as many as there are
    assert len(Stages.read(more, ALONE).data.train) == 36
    with pytest.raises(ConfigError, match="all 36 training examples stand in the prompt"):
        Stages.read(replace(more, reader=replace(more.reader, same_train=True)), ALONE)


def test_evidence_is_the_best_of_the_candidates_and_lines_tell_both_stages(args):
    stages = found_for(args)
    for split, queries in (("train", 32), ("dev", 4), ("test", 12)):
        first, second = (stages.candidates[split].candidates, stages.evidence[split].candidates)
        assert first.rows.shape == second.rows.shape == (queries, 6)
        np.testing.assert_array_equal(np.sort(first.rows), np.sort(second.rows))
        assert (np.diff(second.scores, axis=1) <= 0).all()
        lines = stages.evidence_lines(split)
        assert [line.text for line in lines[0]] == [SENTENCES[r] for r in second.rows[0, :3]]
        for query, evidence in enumerate(lines):
            assert len(evidence) == 3
            places = [line.stage1_rank - 1 for line in evidence]
            assert [line.row for line in evidence] == first.rows[query, places].tolist()
            scores = [line.stage1_score for line in evidence]
            assert scores == pytest.approx(first.scores[query, places])
    assert (first.rows != second.rows).any()  # the control: there is an order to tell


def test_fewer_matches_than_candidates_leave_lines_out(args, corpus_file):
    """BM25 gives no row that shares no word: 'zebra' is in one passage only."""
    corpus_file.write_text("\n".join([*SENTENCES, "A zebra."]) + "\n")
    other = write_jsonl(
        corpus_file.parent / "zebra.jsonl", [{"text": "zebra", "label": "positive"}]
    )
    data = replace(args.data, test_file=str(other))
    stages = found_for(with_retriever(replace(args, data=data), retriever="bm25"))
    assert (stages.candidates["test"].candidates.rows[0, 1:] == MISSING_ROW).all()
    ((line,),) = stages.evidence_lines("test")
    assert line.text == "A zebra."


def test_exhaustive_is_the_two_stages_with_all_passages_as_candidates(args):
    args = with_retriever(args, num_candidates=len(SENTENCES))
    for similarity in SIMILARITIES:
        args = with_rerank(args, similarity=similarity)
        staged = found_for(args, ("test",))
        free = {"encoder": "no-such-folder", "retriever": "exhaustive"}
        whole = found_for(with_retriever(args, **free), ("test",))
        ours, theirs = (f.evidence["test"].candidates for f in (whole, staged))
        np.testing.assert_array_equal(ours.rows, theirs.rows, err_msg=similarity)
        np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-5, err_msg=similarity)
        assert (ours.rows[:, :3] != staged.candidates["test"].candidates.rows[:, :3]).any()
    lines = whole.evidence_lines("test")[0]
    assert [line.stage1_rank for line in lines] == [1, 2, 3]
    assert all(line.stage1_score == line.score for line in lines)


def test_two_processes_search_everything_as_one_does(args, tmp_path):
    args = with_retriever(with_rerank(args, similarity="head"), retriever="exhaustive")
    alone = found_for(args)
    runtime = RuntimeArguments(artifacts_dir=str(tmp_path / "both"), device="cpu")
    both = Barrier(2, timeout=60)

    def work(rank):
        context = Context(Worker(rank, 2), lambda: both.wait() and None)
        stages = Stages.read(replace(args, runtime=runtime), context)
        stages.find()
        return stages

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(work, range(2)):
            for split in ("train", "dev", "test"):
                ours = found.evidence[split].candidates
                np.testing.assert_array_equal(ours.rows, alone.evidence[split].candidates.rows)


# The folder of a run.


def test_a_run_is_known_by_what_decides_it(tmp_path):
    check_same_run(tmp_path / "new", {"seed": 1})
    write_json(tmp_path / "run.json", {"seed": 1, "evidence/test": "ab"})
    check_same_run(tmp_path, {"seed": 2})  # nothing was trained there yet
    (tmp_path / "reader").mkdir()
    check_same_run(tmp_path, {"seed": 1}, is_whole=False)
    with pytest.raises(ArtifactError, match="with seed 1, this run asks for 2: choose another"):
        check_same_run(tmp_path, {"seed": 2}, is_whole=False)
    with pytest.raises(ArtifactError, match='with evidence/test "ab", this run asks for null'):
        check_same_run(tmp_path, {"seed": 1})


# Models that change.


@pytest.mark.parametrize("part", ["lm", "encoder"])
def test_a_model_folder_that_is_replaced_during_a_run_leaves_nothing_under_its_name(
    part, args, tmp_path
):
    name = args.rerank.lm if part == "lm" else args.retriever.encoder
    folder = Path(shutil.copytree(name, tmp_path / "model"))
    change = with_rerank if part == "lm" else with_retriever
    args = change(args, **{part: str(folder)})
    elsewhere = replace(args.runtime, artifacts_dir=str(tmp_path / "other"))
    whole = found_for(replace(args, runtime=elsewhere))  # the control
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    stages = Stages.read(args, ALONE)
    stages.open()
    assert stages.retriever.fingerprint  # the encoder is loaded, the LM only found
    weights.write_bytes(good[:-64] + bytes(64))
    with pytest.raises(ArtifactError, match="model.safetensors changed while it was in use"):
        stages.find()
    weights.write_bytes(good)
    found = found_for(args)
    assert found.fingerprints == whole.fingerprints
    for split in SPLITS:
        ours, theirs = (one.evidence[split].candidates for one in (found, whole))
        np.testing.assert_array_equal(ours.scores, theirs.scores)


# The LM's memory.


def test_no_weight_of_the_lm_is_left_when_the_reader_trains(args, tmp_path, monkeypatch):
    weights, left = [], []

    def load_and_note(lm, load=CausalLM._load):
        model = load(lm)
        weights.extend(weakref.ref(weight) for weight in model.parameters())
        return model

    def train_and_look(*parts, train=methods.fit, **how):
        left.append(sum(ref() is not None for ref in weights))
        return train(*parts, **how)

    monkeypatch.setattr(CausalLM, "_load", load_and_note)
    monkeypatch.setattr(methods, "fit", train_and_look)
    run(run_of(args, "pgra", tmp_path / "run"))
    assert len(weights) > 20  # the control
    assert left == [0]
