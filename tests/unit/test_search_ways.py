"""`pgra search` for people with documents and questions: ways compared, and answers."""

import numpy as np
import pytest
from conftest import SENTENCES

from pgra.cli import main
from pgra.experiments.search_ways import compare_rows


@pytest.fixture
def flags(tmp_path, monkeypatch, encoder_dir, lm_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.txt").write_text("\n".join(SENTENCES) + "\n")
    (tmp_path / "q.tsv").write_text("".join(f"q{n}\t{t}\n" for n, t in enumerate(SENTENCES[:6])))
    (tmp_path / "qrels").write_text("".join(f"q{n} 0 {n} 1\n" for n in range(6)))
    models = ["--encoder", str(encoder_dir), "--lm", str(lm_dir)]
    return ["--corpus", "docs.txt", "--device", "cpu", *models]


def test_ways_are_measured_and_the_best_is_named(flags, capsys):
    ways = ["random", "dense", "bm25+dense", "likelihood", "likelihood+bm25"]
    words = ["--queries", "q.tsv", "--qrels", "qrels", "--num_candidates", "4"]
    assert main(["search", *flags, *words, "--compare", *ways]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {
        line.split()[0]: line.split() for line in lines if line.split()[:1] in [[w] for w in ways]
    }
    assert list(cells) == ways
    for way in ("dense", "bm25+dense"):  # a text's own passage is its nearest
        assert cells[way][1:4] == ["1.0000"] * 3
    assert float(cells["random"][1]) < 1  # the control
    assert [cells[way][5] for way in ways[:4]] == ["0", "0", "0", "24"]
    assert "best: dense, nDCG@10 +" in lines[-1]
    assert main(["search", *flags, *words, "--compare", "dense", "likelyhood"]) == 2


def test_a_sentence_says_how_sure_the_best_is():
    def why(**ways):
        rows = []
        for way, values in ways.items():
            rows.append({"way": way, "values": {"nDCG@10": np.array(values, float)}})
        return compare_rows(rows).notes[-1]

    assert why(a=[0, 1, 1], b=[1, 1, 1]).endswith("p 1), within noise")
    sure = why(a=[0] * 40, b=[1] * 40, c=[0] * 40)
    assert sure.startswith("best: b, nDCG@10 +1.0000 to a (+1.0000 to +1.0000, p ")
    assert sure.endswith(", beyond noise")
    assert why(a=[1, 1], b=[0, 1]).startswith("best: a, nDCG@10 +0.0000 to a")


def test_an_answer_comes_with_the_passage_that_has_it(flags, capsys):
    assert main(["search", SENTENCES[0], *flags, "--answer", "--num_shown", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  answer: ")
    assert len(lines) == 4
    assert main(["search", "a", "--answer", *flags[:-2]]) == 2
