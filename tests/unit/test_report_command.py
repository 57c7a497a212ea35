"""`pgra report`: tables, a figure, and the page, on which hostile text stays text."""

import csv
import re

import pytest
from planted_runs import plant, plant_grid

from pgra.cli import main
from pgra.report.tables import Cell, Table


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        plant(root / f"fid-{seed}", method="fid", seed=seed, wrong=range(20))
        plant(root / f"pgra-{seed}", seed=seed, wrong=range(2))
    return root


def test_csv_has_all_numbers_of_all_groups_and_a_figure_is_of_one(runs, tmp_path, capsys):
    points = {"k=50": {"value": 50, "seeds": {0: [1]}}}
    grid = str(plant_grid(tmp_path / "g", points, reference="T5"))
    assert main(["report", grid]) == 0
    assert "sst2 (paper)" in capsys.readouterr().out  # which the grid names by itself
    words = ["report", str(runs), grid, "--output"]
    assert main([*words, str(tmp_path / "new/a.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "new/a.csv").read_text().splitlines()))
    assert [(row["table"], row["row"], float(row["value"])) for row in rows] == [
        *(("Candidates", "k=50", 97.5), ("Results", "fid", 50.0), ("Results", "pgra", 95.0))
    ]
    assert main([*words, str(tmp_path / "a.png")]) == 2
    assert not (tmp_path / "a.png").exists()
    assert main(["report", grid, "--output", str(tmp_path / "a.png")]) == 0
    assert main([*words, str(tmp_path / "a.md"), "--samples", "1"]) == 2


TABLE = Table(
    "A & B",
    ["method", "sst2", "cr"],
    [
        [Cell("fid_16"), Cell("9.0 ± 0.1", value=9.04), Cell("missing\n")],
        [Cell("a|b*"), Cell("93.9", is_bold=True, value=93.94), Cell("")],
    ],
    ["p < 0.05, 100 %"],
)


def test_markdown_is_escaped_and_padded():
    assert TABLE.to_markdown().splitlines() == [
        "**A &amp; B**",
        "",
        "| method  |      sst2 |      cr |",
        "| :--     |       --: |     --: |",
        r"| fid\_16 | 9.0 ± 0.1 | missing |",
        r"| a\|b\*  |  **93.9** |         |",
        "",
        "- p &lt; 0.05, 100 %",
    ]


HOSTILE = '</pre><script>alert(1)</script><img src=x onerror="alert(1)">{{ title }}'


@pytest.mark.slow
def test_hostile_text_stays_text_and_nothing_is_asked_for_outside(tmp_path):
    hostile = {"text": HOSTILE, "evidence": [[HOSTILE]] * 4, "notes": [HOSTILE]}
    plant(tmp_path / "pgra", n=4, wrong=[1], **hostile)
    plant(tmp_path / "fid", method="fid", n=4, text=HOSTILE)
    path = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--output", str(path)]) == 0
    page = path.read_text(encoding="utf-8")
    assert page.count("&lt;script&gt;alert(1)") > 8
    assert (page.count("✓ right"), page.count("✗ wrong")) == (14, 2)  # in its head and below
    assert not re.search(r"<(script|link|iframe|object|form|a)\b", page)
    (image,) = re.findall(r"<img[^>]*", page)
    assert re.fullmatch(r'<img alt="[\w ]+" src="data:image/svg\+xml;base64,[\w+/=]+"', image)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    # The tables, their notes, and the examples that differ first: pgra is wrong on the second.
    order = [page.index(words) for words in ("<h1>", "<table", "bold, or *", "Examples", "test-1:")]
    assert order == sorted(order)
    assert re.findall(r"test-(\d):", page) == ["1", "0", "2", "3"]
