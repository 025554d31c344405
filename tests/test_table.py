"""Laws of tables: the same cells as Markdown and as aligned text, dashes for null."""

from ecospec.report.table import Column, Table, decimals, percent, signed

COLUMNS = [
    Column("tokens", "tokens", decimals(0)),
    Column("share", "of | all", percent),
    Column("note", "note", str, numeric=False),
]
ROWS = [(["<a>"], {"tokens": 12345, "share": 0.5, "note": "one\ntwo"}), (["b"], {"tokens": 7, "share": None})]


def test_markdown_escapes_text_and_aligns_numbers() -> None:
    assert Table.of(["set"], COLUMNS, ROWS).markdown().split("\n") == [
        "| set | tokens | of \\| all | note |",
        "| --- | ---: | ---: | --- |",
        "| &lt;a&gt; | 12,345 | 50.0 % | one two |",
        "| b | 7 | – | – |",
    ]


def test_text_stands_in_columns() -> None:
    table = Table(["set", "tokens"], [False, True], [["a", "12"], ["longer", "3"]])
    assert table.text() == "set     tokens\na           12\nlonger       3"


def test_a_sign_is_always_written() -> None:
    assert [signed(2)(value) for value in (0.0, 1.5, -0.125)] == ["+0.00", "+1.50", "-0.12"]
