"""`pgra search` for people with documents and questions: ways compared, and answers."""

import numpy as np
import pytest
from conftest import SENTENCES

from pgra.cli import main
from pgra.experiments.search_ways import describe_ways


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
    cells = {line.split()[0]: line.split() for line in lines[2:7]}
    assert list(cells) == ways
    for way in ("dense", "bm25+dense"):  # a text's own passage is its nearest
        assert cells[way][1:4] == ["1.0000"] * 3
    assert float(cells["random"][1]) < 1  # the control
    assert [cells[way][5] for way in ways] == ["0", "0", "0", "24", cells["likelihood+bm25"][5]]
    assert lines[-1].startswith("best: dense, nDCG@10 to random +")
    assert main(["search", *flags, *words, "--compare", "dense", "likelyhood"]) == 2


def test_a_sentence_says_how_sure_the_best_is():
    def last_line(**ways):
        names = ("nDCG@10", "RR@10", "P@1")
        of_all = {way: dict.fromkeys(names, np.array(line, float)) for way, line in ways.items()}
        return describe_ways(of_all, dict.fromkeys(ways, "")).splitlines()[-1]

    assert last_line(a=[0, 1, 1], b=[1, 1, 1]).endswith("p 1, within noise")
    sure = last_line(a=[0] * 40, b=[1] * 40, c=[0] * 40)
    assert sure.startswith("best: b, nDCG@10 to a +1.0000 (+1.0000 to +1.0000), p ")
    assert sure.endswith(", beyond noise")
    assert last_line(a=[1, 1], b=[0, 1]).startswith("best: a, nDCG@10 to a +0.0000")


def test_an_answer_comes_with_the_passage_that_has_it(flags, capsys):
    assert main(["search", SENTENCES[0], *flags, "--answer", "--num_shown", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  answer: ")
    assert len(lines) == 4
    assert main(["search", "a", "--answer", *flags[:-2]]) == 2
