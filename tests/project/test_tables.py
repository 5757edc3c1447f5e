"""Tables in documents: they go where their marks are, and those of the documentation are those of its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reports import RESULTS
from benchmarks.tables import policy_tables, proof_tables, write_tables, year_tables
from tests.support import ROOT


def test_a_document_without_marks_is_told_of(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no line such as <!-- table: x -->"):
        write_tables({"x": "y"}, [file])
    file.write_text("<!-- table: x -->\n")
    with pytest.raises(ValueError, match="there is no line <!-- end of table --> below <!-- table: x -->"):
        write_tables({"x": "y"}, [file])
    assert file.read_text() == "<!-- table: x -->\n"


@pytest.mark.parametrize(
    ("figures", "tables", "page"),
    [
        ("policies", policy_tables, "docs/policy.md"),
        ("recurrences", proof_tables, "docs/proof.md"),
        ("recurrences", proof_tables, "README.md"),
        ("year", year_tables, "docs/proof.md"),
    ],
)
def test_the_tables_of_the_documentation_are_those_of_its_figures(
    figures: str, tables: Callable[[Any], dict[str, str]], page: str, tmp_path: Path
) -> None:
    shown = (ROOT / page).read_text()
    copy = tmp_path / "page.md"
    copy.write_text(shown)
    write_tables(tables(json.loads((RESULTS / f"{figures}.json").read_text())), [copy])
    assert copy.read_text() == shown
