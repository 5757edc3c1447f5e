"""No combination silently trains at a size other than its reported size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.ranks import run_ranks
from tests.support.warm import LIGHTNING, TRANSFORMERS
from tests.sweep.verdict import verdict_of

pytestmark = pytest.mark.slow

# Data that cannot follow the batch size and must be refused.
REFUSED = {
    "accumulated by hand",
    "steps left out",
    "buckets made before",
    "size read once",
    "little data",
    "fixed batches",
    "length computed once",
    "items that are batches",
    "little data and drop_last",
    "accumulation by schedule",
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_combination_silently_trains_at_another_size(world_size: int, tmp_path: Path) -> None:
    modules = (*LIGHTNING, *TRANSFORMERS)
    if world_size == 1:
        ended = warm.run("tests.sweep", str(tmp_path), modules=modules)
        assert ended.returncode == 0, ended.stderr
    else:
        status = run_ranks("tests.sweep", str(tmp_path), modules=modules, output=tmp_path / "output")
        assert not any(status), (tmp_path / "output").read_text()
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    found: list[tuple[dict[str, Any], str]] = [
        (case, verdict_of([outcome, *(rank[number][1] for rank in ranks[1:])]))
        for number, (case, outcome) in enumerate(ranks[0])
    ]
    assert [(case, verdict) for case, verdict in found if verdict.startswith("SILENT")] == []
    refused = Counter(case["source"] for case, verdict in found if verdict.startswith("refused"))
    manual = {"manual optimization"}  # if Lightning does not accumulate, a cap is refused
    assert set(refused) - manual == {case["source"] for case, _ in found} & REFUSED
    assert len(found) >= {1: 120, 2: 65}[world_size]


def outcome(*epochs: list[int], refusal: str | None = None, wrong: str | None = None) -> dict[str, Any]:
    return {"steps": list(epochs), "reported": 1.0, "refusal": refusal, "wrong": wrong}


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([outcome([48, 48, 24], [48])], "as reported"),
        ([outcome([24, 24, 12]), outcome([24, 24, 12])], "as reported"),
        ([outcome([48, 48], [72, 48, 48])], "as reported"),
        ([outcome([], refusal="no")], "refused: no"),
        ([outcome([72, 48, 48])], "SILENT"),
        ([outcome([48, 48], [96, 48, 48])], "SILENT"),
        ([outcome([48, 48], [24, 48, 48])], "SILENT"),
        ([outcome([16, 16])], "SILENT"),
        ([outcome([24])], "SILENT"),
        ([outcome([48, 96])], "SILENT"),
        ([outcome([24, 24]), outcome([16, 24])], "SILENT"),
        ([outcome([24]), outcome([24], refusal="no")], "SILENT"),
        ([outcome()], "SILENT"),
        ([outcome([48], wrong="20 of 30 steps")], "SILENT: 20 of 30 steps"),
    ],
)
def test_verdict_separates_correct_refused_and_silent_trainings(ranks: list[dict[str, Any]], verdict: str) -> None:
    assert verdict_of(ranks).startswith(verdict)
