"""The examples of docs/testing.md run as a reader would copy them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

PAGE = ROOT / "docs" / "testing.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(name="example")
def run_example() -> dict[str, Any]:
    (text,) = EXAMPLES
    names: dict[str, Any] = {}
    exec(compile(text, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    return names


def test_the_example_of_listed_measurements(example: dict[str, Any], tmp_path: Path) -> None:
    example["test_the_training_ends_when_it_reaches_the_target"](tmp_path)


def test_the_example_of_a_machine_with_power_limits(example: dict[str, Any]) -> None:
    example["test_the_limit_that_takes_least_energy_is_chosen"]()


def test_there_are_no_other_examples(example: dict[str, Any]) -> None:
    assert len([name for name in example if name.startswith("test_")]) == 2
