"""Markdown tables, and their places in documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_END = "<!-- end of table -->"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table; the first line is its head."""
    head, *body = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def replace_tables(tables: Mapping[str, str], file: Path) -> None:
    """Replace the tables of a document, which stand between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.

    Args:
        tables: What goes there, by name; those that the document has no marks for are an error.
        file: The document.

    Raises:
        ValueError: The document lacks the marks of a table.
    """
    text = file.read_text("utf-8")
    for name, table in tables.items():
        start = mark_of(name)
        before, begins, rest = text.partition(f"{start}\n")
        _, ends, after = rest.partition(_END)
        if not (begins and ends):
            raise ValueError(f"{file}: there is no line {start} with {_END} below it, between which the table goes")
        text = f"{before}{start}\n{table}\n{_END}{after}"
    file.write_text(text, "utf-8")


def mark_of(name: str) -> str:
    """The line above a table."""
    return f"<!-- table: {name} -->"
