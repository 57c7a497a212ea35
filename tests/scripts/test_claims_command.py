"""`pgra data claims`, and a run on what it made."""

import pytest
from scripted import call, write_passages

from pgra.commands.lists import data


def flags(bench, name, **changes):
    sizes = {"num_train": 16, "num_dev": 4, "num_test": 8, "corpus": bench.corpus}
    given = {**sizes, "output_dir": bench.root / name, "artifacts_dir": bench.artifacts, **changes}
    return ["claims", *(str(word) for key, value in given.items() for word in (f"--{key}", value))]


@pytest.mark.slow
def test_claims_are_made_of_a_corpus_and_a_reader_is_trained_on_them(new_bench, t5_dirs):
    bench = new_bench
    write_passages(bench.corpus, 60)  # "17 The film was ...": a number, or a year of SENTENCES
    made = call(data, flags(bench, "made", kind="number"))
    assert made.code == 0, made.err
    assert "16 training, 4 dev and 8 test claims" in made.out
    again = call(data, flags(bench, "made", kind="number"))
    assert again.out.replace(" (already there)", "") == made.out != again.out
    folder = bench.root / "made"
    how = {"task": "claims", "dataset_name": folder, "corpus": folder / "corpus.txt"}
    files = {"train_file": None, "test_file": None, "lm": None, "num_exemplars": None}
    bench.make("read", method="fid", model_name_or_path=t5_dirs["byt5"], **how, **files)
    assert len(bench.predictions("read")) == 8
    assert all(len(line["evidence"]) == 2 for line in bench.predictions("read"))
