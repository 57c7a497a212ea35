"""Files inside packages, and the models and data made from them."""

import hashlib
import sys

import pytest

from pgra.data.bundled import (
    BUNDLED_MODELS,
    Bundled,
    article_lines,
    bundled_corpus_file,
    bundled_model_dir,
    clean_review,
    draw_test_rows,
    split_sentences,
)
from pgra.errors import PgraError

HELLO = hashlib.sha256(b"hello").hexdigest()


def test_a_changed_file_of_a_package_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "site" / "pgra_fake_package"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "data" / "a.txt").write_text("hello")
    monkeypatch.syspath_prepend(str(folder.parent))

    def find(module="pgra_fake_package", file="data/a.txt", sha256=HELLO):
        about = ("fake", "encoder", "about", "licence", "note", "fake==1.0")
        monkeypatch.setitem(BUNDLED_MODELS, "fake", Bundled(*about, module, {file: sha256}))
        return bundled_model_dir("fake")

    assert (find() / "a.txt").read_text() == "hello"
    assert "pgra_fake_package" not in sys.modules  # found without importing it
    for change in ({"module": "pgra_no_such_package"}, {"file": "b"}):
        with pytest.raises(PgraError, match="pip install"):
            find(**change)
    with pytest.raises(PgraError, match="fake"):
        find(sha256="0" * 64)


def test_like_texts_stand_on_one_side_of_the_split():
    test = draw_test_rows([f"text {i // 2}" + " !" * (i % 2) for i in range(100)])
    assert len(test) == 20
    assert all((row ^ 1) in test for row in test)


def test_sentences_are_whole_and_texts_without_markup():
    text = "Dr. A. Smith met J. R. Roe in the U.S. Army. They left (in 1990.) It rained, e.g. Hard!"
    assert list(split_sentences(text)) == [
        "Dr. A. Smith met J. R. Roe in the U.S. Army.",
        "They left (in 1990.)",
        "It rained, e.g. Hard!",
    ]
    assert clean_review("it\x92s a \x93film\x94<br /><br />ok") == "it’s a “film” ok"  # noqa: RUF001
    article = "Body.\n==See also==\n* A link\n===More===\nx\n==History==\n'''Bold''' text.\n* Item."
    assert list(article_lines(article)) == ["Body.", "Bold text.", "Item."]


@pytest.mark.slow
def test_the_bundled_corpus_is_distinct_sentences():
    lines = bundled_corpus_file("wikipedia-19k").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 18_455


@pytest.mark.slow
def test_bundled_t5_keeps_its_untied_head():
    from transformers import AutoModelForSeq2SeqLM

    folder = bundled_model_dir("t5-small-titles")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, use_safetensors=True)
    assert not model.lm_head.weight.equal(model.shared.weight)
