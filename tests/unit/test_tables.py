import csv
import io

import pytest

from pgra.report.tables import FORMATS, Cell, Table

TABLE = Table(
    "A & B",
    ["method", "sst2", "cr"],
    [
        [Cell("fid_16"), Cell("9.0 ± 0.1", value=9.04), Cell("missing")],
        [Cell("a|b*"), Cell("93.9", is_bold=True, value=93.94), Cell("")],
    ],
    ["p < 0.05, 100 %"],
)


def test_markdown_is_escaped_and_its_rule_aligns_numbers_to_the_right():
    assert TABLE.to_markdown().splitlines() == [
        "**A &amp; B**",
        "",
        "| method  |      sst2 |      cr |",
        "| :------ | --------: | ------: |",
        r"| fid\_16 | 9.0 ± 0.1 | missing |",
        r"| a\|b\*  |  **93.9** |         |",
        "",
        "- p &lt; 0.05, 100 %",
    ]


def test_latex_is_escaped_and_whole():
    text = TABLE.to_latex()
    for part in (
        *(r"\caption{A \& B}", r"fid\_16 & 9.0 $\pm$ 0.1 & missing \\", r"\begin{tabular}{lrr}"),
        *(r"a$|$b* & \textbf{93.9} &  \\", r"p $<$ 0.05, 100 \%"),
    ):
        assert part in text
    # A row that begins with a bracket is no argument of the row above.
    text = Table("T", ["a", "b"], [[Cell("x"), Cell("1")], [Cell("[4, 8]"), Cell("2")]]).to_latex()
    assert "x & 1 \\\\\n{[}4, 8] & 2" in text


def test_csv_holds_numbers_unrounded():
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows[1:] == [["fid_16", "9.04", "missing"], ["a|b*", "93.94", ""]]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_line_break_breaks_no_row(name):
    table = Table("T", ["a", "b"], [[Cell("x\ny"), Cell("1", value=1.0)]])
    one = Table("T", ["a", "b"], [[Cell("x y"), Cell("1", value=1.0)]])
    if name == "csv":  # quoted there
        assert list(csv.reader(io.StringIO(table.to_csv())))[1] == ["x\ny", "1.0"]
    else:
        assert FORMATS[name](table) == FORMATS[name](one)
