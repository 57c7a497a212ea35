"""What is given from Python: whatever takes texts refuses the same, by one kind of error."""

import math
from contextlib import nullcontext

import pandas as pd
import pytest
from conftest import SENTENCES, review_rows

import pgra
from pgra.errors import DataError

BAD = [None, math.nan, 5, b"film", " ", ["film", None], ["half \ud83d"], ["nul \0"], [["film"]]]
BAD += [{"other": "film"}, pd.DataFrame({"other": ["film"]})]
TWO = pd.Series(["a warm film", "the sea"])


@pytest.fixture(scope="module")
def calls(lm_dirs, encoder_dir, tmp_path_factory):
    home, lm, rows = str(tmp_path_factory.mktemp("given")), str(lm_dirs["opt"]), review_rows(12)
    encoder = pgra.Encoder(str(encoder_dir), device="cpu")
    states = pgra.Reranker(lm, template="{text}")
    pairs = pgra.Reranker(lm, by="likelihood")
    classifier = pgra.Classifier(lm, rows, num_exemplars=0, encoder="none")
    train = {
        "train": rows,
        "test": review_rows(4, start=20),
        "encoder": str(encoder_dir),
        "artifacts_dir": home,
    }
    return {
        "states": lambda query: states.rank(query, TWO),
        "likelihood": lambda query: pairs.rank(query, TWO),
        "index": pgra.Index.build(SENTENCES, encoder=encoder).search,
        "selector": pgra.ExemplarSelector(rows, encoder=encoder).select,
        "classifier": lambda texts: classifier.predict_proba(texts).tolist(),
        "run": pgra.train("sst2", method="knn", output_dir=f"{home}/run", **train).predict,
        "build": lambda texts: pgra.Index.build(texts, encoder=encoder).search("film"),
        "documents": lambda texts: states.rank("film", texts),
        "documents of pairs": lambda texts: pairs.rank("film", texts),
        "encoder": lambda texts: encoder.encode(texts).tolist(),
    }


def test_whatever_takes_texts_refuses_what_is_none(calls, memory):
    for bad in BAD:
        with pytest.raises(DataError):
            memory.search(bad)
    for name, call in calls.items():
        for bad in BAD:
            with pytest.raises(DataError):
                call(bad)
        may_be_blank = name in ("documents", "documents of pairs", "encoder")
        with nullcontext() if may_be_blank else pytest.raises(DataError):
            call(["film", ""])
        assert call(TWO) == call([*TWO]) != call(TWO[::-1]), name  # the controls
        assert may_be_blank or call(TWO) == call([f" {text}\n" for text in TWO])
