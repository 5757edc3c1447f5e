"""Environment variables of the training side: declared once, read in one module, and documented."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import ROOT
from zeus_plugins.environment import VARIABLES, Variable
from zeus_plugins.errors import ZeusBSOConfigError

SECONDS = Variable("ZEUS_SECONDS", "the patience", "10", "seconds")


def uses_of_the_environment(path: Path) -> list[int]:
    """Return the lines that read the environment, except for passing it to a child process, ``{**os.environ, …}``."""
    tree = ast.parse(path.read_text())
    handed_on = {
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key is None
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
        and id(node) not in handed_on
    ]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("zeus_plugins/**/*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_only_environment_py_reads_the_environment(path: Path) -> None:
    assert bool(uses_of_the_environment(path)) is (path.name == "environment.py")


def test_documentation_lists_the_declared_variables() -> None:
    lines = (ROOT / "docs" / "environment.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert rows == [[f"`{each.name}`", each.meaning, each.default, each.unit] for each in VARIABLES]


def test_each_variable_is_declared_once() -> None:
    names = [each.name for each in VARIABLES]
    assert len(names) == len(set(names))
    assert {"ZEUS_SERVER_URL", "ZEUS_BSO_TOKEN", "ZEUS_JOB_ID", "ZEUS_STATE_DIR", "CUDA_VISIBLE_DEVICES"} < set(names)


@pytest.mark.parametrize(
    ("variable", "text", "number"),
    [
        (SECONDS, None, None),
        (SECONDS, "", None),
        (SECONDS, "2.5", 2.5),
        (SECONDS, " 3 ", 3.0),
        (SECONDS, "-1", -1.0),
        (SECONDS, "inf", float("inf")),
    ],
)
def test_number_is_read_from_a_variable(variable: Variable, text: str | None, number: float | None) -> None:
    assert variable.number({} if text is None else {variable.name: text}) == number


@pytest.mark.parametrize(
    ("variable", "text", "is_positive"),
    [
        (SECONDS, "soon", False),
        (SECONDS, "nan", False),
        (SECONDS, "0", True),
        (SECONDS, "inf", True),
    ],
)
def test_invalid_number_is_reported_with_a_remedy(variable: Variable, text: str, is_positive: bool) -> None:
    with pytest.raises(ZeusBSOConfigError) as caught:
        variable.number({variable.name: text}, is_positive=is_positive)
    wanted = f"a finite number of {variable.unit} above 0" if is_positive else "a number"
    assert str(caught.value) == (
        f"the environment variable {variable.name} is {text!r}: set it to {wanted}, {variable.meaning}, or unset it"
    )


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_SECONDS", "4")
    assert (SECONDS.text(), SECONDS.number(), SECONDS.text({})) == ("4", 4.0, None)


def test_secret_is_not_shown() -> None:
    secret = Variable("ZEUS_SECRET", "the password", is_secret=True)
    values = [{}, {"ZEUS_SECRET": ""}, {"ZEUS_SECRET": "hush"}]
    assert [secret.shown(environ) for environ in values] == [None, "", "(set)"]
    assert SECONDS.shown({"ZEUS_SECONDS": "4"}) == "4"
