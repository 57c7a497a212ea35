"""Both retrieval stages on a task: what they find, share, store and refuse."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SENTENCES, with_rerank, with_retriever, write_jsonl

from pgra.context import ALONE
from pgra.errors import ArtifactError
from pgra.methods.base import SPLITS
from pgra.methods.stages import Stages
from pgra.types import MISSING_ROW

pytestmark = pytest.mark.slow


def found_for(args, splits=SPLITS, context=ALONE):
    stages = Stages.read(args, context)
    stages.find(splits)
    return stages


@pytest.mark.parametrize(
    "method", ["plain", "fid", "random", "ablations.rag:Rag", "knn", "cross-encoder"]
)
def test_a_method_without_a_prompt_trains_on_all(args, method):
    shown = Stages.read(args, ALONE)
    assert (len(shown.data.train), len(shown.data.set_aside)) == (32, 4)
    if method == "cross-encoder":
        mine = with_rerank(args, reranker=method)
    else:
        mine = args.having(runtime=replace(args.runtime, method=method))
    whole = Stages.read(mine, ALONE)
    assert len(whole.data.train) == 36
    same = Stages.read(mine.having(reader=replace(mine.reader, same_train=True)), ALONE)
    assert same.data.train == shown.data.train != whole.data.train
    assert same.fingerprints["train"] == shown.fingerprints["train"] != whole.fingerprints["train"]
    assert same.prompt.exemplar_ids == whole.prompt.exemplar_ids == ()


def test_fewer_matches_than_candidates_leave_lines_out(args, corpus_file):
    """BM25 gives no row that shares no word: 'zebra' is in one passage only."""
    corpus_file.write_text("\n".join([*SENTENCES, "A zebra."]) + "\n")
    other = write_jsonl(
        corpus_file.parent / "zebra.jsonl", [{"text": "zebra", "label": "positive"}]
    )
    data = replace(args.data, test_file=str(other))
    stages = found_for(with_retriever(args.having(data=data), retriever="bm25"))
    assert (stages.candidates["test"].candidates.rows[0, 1:] == MISSING_ROW).all()
    ((line,),) = stages.evidence_lines("test")
    assert line.text == "A zebra."


@pytest.mark.parametrize("part", ["lm", "encoder"])
def test_a_model_folder_replaced_during_a_run_leaves_nothing(part, args, tmp_path):
    name = args.rerank.lm if part == "lm" else args.retriever.encoder
    folder = Path(shutil.copytree(name, tmp_path / "model"))
    change = with_rerank if part == "lm" else with_retriever
    args = change(args, **{part: str(folder)})
    elsewhere = replace(args.runtime, artifacts_dir=str(tmp_path / "other"))
    whole = found_for(args.having(runtime=elsewhere))  # the control
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    stages = Stages.read(args, ALONE)
    stages.open()
    assert stages.retriever.fingerprint  # the encoder is loaded, the LM only found
    weights.write_bytes(good[:-64] + bytes(64))
    with pytest.raises(ArtifactError, match="model.safetensors"):
        stages.find()
    weights.write_bytes(good)
    found = found_for(args)
    assert found.fingerprints == whole.fingerprints
    for split in SPLITS:
        ours, theirs = (one.evidence[split].candidates for one in (found, whole))
        np.testing.assert_array_equal(ours.scores, theirs.scores)
