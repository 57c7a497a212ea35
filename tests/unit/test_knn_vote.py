import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import with_retriever
from transformers import AutoTokenizer, T5EncoderModel

from pgra.encoders.encoder import load_encoder, load_t5_encoder
from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.methods.knn import NUMBERS, run, vote
from pgra.methods.pgra import read_task
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.runs import run_system


def training(folder):
    return ReaderTrainingArguments(output_dir=str(folder), use_cpu=True)


def as_knn(args, **changes):
    args = with_retriever(args, **changes)
    return replace(args, runtime=replace(args.runtime, system="knn"))


def test_a_hand_worked_vote():
    columns = np.array([0, 0, 1, 1, 2])
    votes = vote(np.array([[4, 2, 3], [0, 4, 1], [4, 0, 2]]), columns, 3)
    np.testing.assert_allclose(votes.shares * 3, [[0, 2, 1], [2, 0, 1], [1, 1, 1]])
    assert votes.decided.tolist() == [1, 0, 2]  # the last is a tie: the nearest's label


def test_a_tie_goes_to_the_tied_label_with_the_nearest_neighbor():
    columns = np.array([2, 1, 1, 0, 0])
    assert vote(np.array([[0, 3, 1, 2, 4]]), columns, 3).decided.tolist() == [0]
    assert vote(np.array([[0, 1, 3, 4, 2]]), columns, 3).decided.tolist() == [1]  # the control


def predictions(folder):
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("encoder", ["encoder", "reader"])
def test_labels_are_the_nearest_examples(args, tmp_path, encoder):
    args = as_knn(args, num_neighbors=1, neighbor_encoder=encoder)
    found = read_task(args)
    if encoder == "encoder":
        model = load_encoder(args.retriever, "cpu")
    else:
        model = load_t5_encoder(args.reader.model_name_or_path, device="cpu")
    train, test = (
        model.encode([example.text for example in part])
        for part in (found.splits.train, found.splits.test)
    )
    nearest = (test @ train.T).argmax(axis=1)
    expected = [found.splits.train[row].label for row in nearest]
    run(args, training(tmp_path / "knn"))
    assert [line["prediction"] for line in predictions(tmp_path / "knn")] == expected
    assert len({tuple(line["scores"].values()) for line in predictions(tmp_path / "knn")}) <= 2


def test_a_vector_of_a_t5_is_the_mean_of_its_encoders_states(t5_dir):
    texts = ["The film is warm.", "A dull, lifeless story that wastes its good actors."]
    model, tokenizer = T5EncoderModel.from_pretrained(t5_dir), AutoTokenizer.from_pretrained(t5_dir)
    with torch.no_grad():
        states = [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in texts
        ]
    found = load_t5_encoder(str(t5_dir), normalize=False, device="cpu").encode(texts)
    np.testing.assert_allclose(found, torch.stack(states).numpy(), rtol=1e-4, atol=1e-5)
    unit = load_t5_encoder(str(t5_dir), device="cpu").encode(texts)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)


def test_what_is_no_t5_is_refused(encoder_dir):
    with pytest.raises(ModelError, match="gives no T5 encoder .it is no T5.: use --neighbor_enc"):
        load_t5_encoder(str(encoder_dir), device="cpu")


def test_the_dev_set_chooses_how_many_vote(args, tmp_path):
    outcome = run_system(as_knn(args), training(tmp_path / "knn"))
    tried = [number for number in NUMBERS if number <= 32]
    assert outcome.training["num_neighbors"] in tried
    values = []
    for number in tried:  # the same, one by one
        one = as_knn(args, num_neighbors=number)
        dev = replace(one, data=replace(one.data, test_file=dev_file(args, tmp_path)))
        values.append(run(dev, training(tmp_path / f"k{number}")).metrics["value"])
    assert outcome.training["value"] == max(values)
    assert outcome.training["num_neighbors"] == tried[values.index(max(values))]
    note = f"{outcome.training['num_neighbors']} neighbors vote, best of 1, 3, 5, 9, 17 on the dev"
    assert outcome.metrics["notes"][0].startswith(note)
    assert outcome.metrics["system"] == "knn"


def dev_file(args, tmp_path):
    path = tmp_path / "dev.jsonl"
    rows = [{**e.fields, "label": e.label} for e in read_task(args).splits.dev]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_finished_run_is_taken_up_and_another_refused(args, tmp_path):
    first = run(as_knn(args, num_neighbors=3), training(tmp_path / "knn"))
    again = run(as_knn(args, num_neighbors=3), training(tmp_path / "knn"))
    assert (first.reused, again.reused) == (False, True)
    assert again.metrics == first.metrics
    chosen = run(as_knn(args), training(tmp_path / "chosen"))
    assert run(as_knn(args), training(tmp_path / "chosen")).training == chosen.training != {}
    with pytest.raises(ArtifactError, match=r"num_neighbors \[3\], this run asks for \[5\]"):
        run(as_knn(args, num_neighbors=5), training(tmp_path / "knn"))
    with pytest.raises(ConfigError, match=r"num_neighbors \(33\) exceeds the 32 training"):
        run(as_knn(args, num_neighbors=33), training(tmp_path / "knn"))
