"""Two processes probe alike, and train on as if they had not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import IS_ABSENT
from tests.support.ranks import run_ranks
from tests.support.warm import LIGHTNING, TRANSFORMERS

MODULES = {"lightning": LIGHTNING, "huggingface": TRANSFORMERS}


@pytest.mark.parametrize(
    "framework",
    ["lightning", pytest.param("huggingface", marks=pytest.mark.skipif(IS_ABSENT, reason="needs the transformers"))],
)
def test_two_processes_probe_same_sizes_and_leave_no_trace(framework: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    ended = run_ranks("tests.support.probed_ranks", framework, str(tmp_path), modules=MODULES[framework], output=output)
    assert ended == [0, 0], output.read_text()
    seen: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for each in seen:
        for way in ("auto", "memory"):
            for name in ("losses", "trained", "weights", "steps"):
                assert each[way][name] == each["off"][name], (way, name)
    first, second = seen
    assert first["off"]["losses"] != second["off"]["losses"]
    # The second process has no session and sends no requests.
    assert [each["auto"]["sizes"] for each in seen] == [[[8, 16, 32, 64]], []]
    assert first["auto"]["has_scale"] == [True]
    # Batches of 64 over both processes run out of memory on the second.
    assert first["memory"]["sizes"] == [[8, 16, 32]]
    assert first["memory"]["out_of_memory"] == [64]
    # The first run of a job trains at the predicted size on both processes, as if this were the default.
    for each in seen:
        assert set(each["predicted"]["trained"]) == {32}
        for name in ("losses", "trained", "weights", "steps"):
            assert each["predicted"][name] == each["direct"][name], name
    # Each of three launches that probe and have the memory says so once.
    assert output.read_text().count("zeus: probed 4 sizes in") == 3
    assert "not probed" not in output.read_text()
