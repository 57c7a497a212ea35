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


def test_csv_holds_numbers_unrounded():
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows[1:] == [["fid_16", "9.04", "missing"], ["a|b*", "93.94", ""]]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_line_break_breaks_no_row(name):
    table = Table("T", ["a", "b"], [[Cell("x\ny"), Cell("1", value=1.0)]])
    one = Table("T", ["a", "b"], [[Cell("x y"), Cell("1", value=1.0)]])
    if name == ".csv":  # quoted there
        assert list(csv.reader(io.StringIO(table.to_csv())))[1] == ["x\ny", "1.0"]
    else:
        assert FORMATS[name](table) == FORMATS[name](one)
