from pgra.report.tables import Cell, Table

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
