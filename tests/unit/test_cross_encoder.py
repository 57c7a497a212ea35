"""A cross-encoder's scores against stock calls of transformers and sentence-transformers."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from small_reranking import QUERIES, ROWS, of_pairs
from tiny_models import build_cross_encoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pgra.errors import ModelError
from pgra.rerank.cross_encoder import CrossEncoderArguments

PAIRS = [
    (query.text, SENTENCES[row])
    for query, line in zip(QUERIES, ROWS, strict=True)
    for row in line
    if row > -1
]


@pytest.fixture
def start(corpus, cross_encoder_dir, tmp_path):
    def start(folder=cross_encoder_dir, **changes):
        options = CrossEncoderArguments(cross_encoder=str(folder))
        return of_pairs("cross-encoder", options, corpus, tmp_path / "artifacts", **changes)

    return start


def score(model, pairs=PAIRS):
    return model.compute(model.tokenize(*zip(*pairs, strict=True)), int)()[:, 0].numpy()


def by_hand(folder, pairs=PAIRS):
    """Run each pair alone; give its logits."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits for pair in pairs])


@pytest.mark.parametrize("batch_tokens", [1, 64])
def test_one_logit_is_the_score_whatever_the_batches(start, cross_encoder_dir, batch_tokens):
    model = start(lm_batch_tokens=batch_tokens)
    found = score(model)
    np.testing.assert_allclose(found, by_hand(cross_encoder_dir)[:, 0], rtol=1e-4, atol=1e-5)
    assert np.ptp(found) > 0.1
    turned = score(model, [pair[::-1] for pair in PAIRS])
    assert np.abs(turned - found).max() > 0.05  # the control: query and passage are not alike


@pytest.mark.gpu
def test_a_gpu_gives_the_same_scores(start, cross_encoder_dir):
    scores = score(start(device="cuda"))
    np.testing.assert_allclose(scores, by_hand(cross_encoder_dir)[:, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("num_labels", [1, 2])
def test_a_folder_that_sentence_transformers_saved_gives_its_scores(start, tmp_path, num_labels):
    from sentence_transformers import CrossEncoder as Stock

    folder = build_cross_encoder(tmp_path / "plain", num_labels=num_labels)
    how = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    stock = Stock(str(folder), device="cpu", max_length=20, **how)
    stock.save_pretrained(str(tmp_path / "saved"))
    texts = [" ".join(SENTENCES)[:length] for length in (15, 50, 55, 500)]
    pairs = [*PAIRS, *product(texts, repeat=2)]  # most of the last are cut
    found = torch.from_numpy(score(start(tmp_path / "saved"), pairs))
    expected = stock.predict(pairs, show_progress_bar=False, convert_to_tensor=True)
    if num_labels == 1:  # the library's own is behind a sigmoid, which keeps the order
        torch.testing.assert_close(found.sigmoid(), expected, rtol=1e-4, atol=1e-5)
    else:  # logits of each class
        torch.testing.assert_close(found, expected.log_softmax(1)[:, 1], rtol=1e-4, atol=1e-5)
    whole = score(start(folder), pairs)
    assert abs(whole[-1] - found[-1]) > 1e-4  # the control: its length is the saved one's


@pytest.mark.parametrize("filler", ["<pad>", "</s>", None])
def test_a_decoder_without_padding_scores_a_pair_as_alone(start, lm_dirs, tmp_path, filler):
    config = {"num_labels": 1, "pad_token_id": None}
    model = AutoModelForSequenceClassification.from_pretrained(lm_dirs["llama"], **config)
    model.save_pretrained(tmp_path)
    how = {"padding_side": "left", "pad_token": filler}
    AutoTokenizer.from_pretrained(lm_dirs["llama"], **how).save_pretrained(tmp_path)
    found = score(start(tmp_path))
    np.testing.assert_allclose(found, by_hand(tmp_path)[:, 0], rtol=1e-4, atol=1e-5)
    assert np.ptp(found) > 0.01  # the control


def test_of_classes_it_is_the_log_probability_of_the_relevant(start, tmp_path):
    for names, column in (
        (["contradiction", "ENTAILMENT", "neutral"], 1),
        (["other", "no", "relevant"], 2),
        (["LABEL_0", "LABEL_1"], 1),
        (["entailment", "not_entailment"], 0),
        (["yes", "no"], None),
    ):
        folder = build_cross_encoder(tmp_path / "-".join(names), num_labels=len(names))
        config = json.loads((folder / "config.json").read_text())
        config["id2label"] = dict(enumerate(names))
        config["label2id"] = {name: number for number, name in enumerate(names)}
        (folder / "config.json").write_text(json.dumps(config))
        if column is None:
            with pytest.raises(ModelError, match=names[0]):
                start(folder)
        else:
            expected = by_hand(folder).log_softmax(1)[:, column]
            np.testing.assert_allclose(score(start(folder)), expected, rtol=1e-4, atol=1e-5)


def test_a_pair_has_no_more_tokens_than_the_model_reads(start):
    window = start().max_tokens
    for most, expected in ((window - 1, window - 1), (window + 1, window)):
        model = start(max_prompt_tokens=most)
        (pair,) = model.tokenize(["word " * 1500], ["word " * 1500])  # not all pairs of pieces
        assert len(pair["input_ids"]) == expected


def test_parts_beyond_the_embeddings_are_refused_when_it_is_opened(
    cross_encoder_dir, start, tmp_path
):
    folder = shutil.copytree(cross_encoder_dir, tmp_path / "copy")
    names = ["input_ids", "token_type_ids", "attention_mask"]
    AutoTokenizer.from_pretrained(folder, model_input_names=names).save_pretrained(folder)
    start(folder)  # the control
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "type_vocab_size": 1}))
    with pytest.raises(ModelError, match="2, the model 1"):
        start(folder)
