"""`pgra data claims`, and a run on what it made."""

import pytest
from scripted import call, write_passages

from pgra.commands.lists import data


def flags(bench, name, **changes):
    sizes = {"num_train": 16, "num_dev": 4, "num_test": 8, "corpus": bench.corpus}
    given = {**sizes, "output_dir": bench.root / name, "artifacts_dir": bench.artifacts, **changes}
    return ["claims", *(str(word) for key, value in given.items() for word in (f"--{key}", value))]


SPLITS = {"train": 16, "validation": 4, "test": 8}


@pytest.mark.slow
def test_claims_are_made_of_a_corpus_and_a_reader_is_trained_on_them(new_bench, t5_dirs):
    bench = new_bench
    write_passages(bench.corpus, 60)  # "17 The film was ...": a number, or a year of SENTENCES
    made = call(data, flags(bench, "made", kind="number"))
    assert made.code == 0, made.err
    assert all(f"{count} {split}" in made.out for split, count in SPLITS.items())
    again = call(data, flags(bench, "made", kind="number"))
    assert again.out.replace(" (already there)", "") == made.out != again.out
    folder = bench.root / "made"
    how = {"task": "claims", "dataset_name": folder, "corpus": folder / "corpus.txt"}
    files = {"train_file": None, "test_file": None, "lm": None, "num_exemplars": None}
    bench.make("read", method="fid", model_name_or_path=t5_dirs["byt5"], **how, **files)
    assert len(bench.predictions("read")) == 8
    assert all(len(line["evidence"]) == 2 for line in bench.predictions("read"))
