"""Trainings of both frameworks on two real processes: one sets the machine's limits, both know the choice."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.power_limit_bench import BEST_W, FOUND_W, is_as_the_table
from tests.support.ranks import stories_of
from tests.support.servers import ServerProcess
from tests.support.warm import LIGHTNING, TRANSFORMERS
from zeus_plugins.client.http import BsoClient
from zeus_plugins.power_limit import PowerLimitProfile

PER_EPOCH = 6
# Two limits of three steps in each epoch; then the chosen one.
LIMITS_OF_STEPS = [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3 + [BEST_W] * 2 * PER_EPOCH


def run(framework: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run both processes; return their observations."""
    if importlib.util.find_spec(framework) is None and not os.environ.get("CI"):
        pytest.skip(f"needs zeus-plugins[{framework}]")
    modules = LIGHTNING if framework == "lightning" else TRANSFORMERS
    return stories_of("tests.support.power_limit_processes", folder, framework, *arguments, modules=modules)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_single_process_sets_the_limits_and_both_know_the_choice(framework: str, tmp_path: Path) -> None:
    first, second = run(framework, tmp_path)
    assert first["chosen_limit_w"] == second["chosen_limit_w"] == BEST_W
    assert first["profile"] == second["profile"]
    assert is_as_the_table(PowerLimitProfile.model_validate(first["profile"]))
    assert first["profile"]["batch_size"] == 32
    assert PowerLimitProfile.load(tmp_path / "profile.json") == PowerLimitProfile.model_validate(first["profile"])
    assert first["limits_of_steps"] == LIMITS_OF_STEPS
    assert first["set_w"][-1] == FOUND_W
    assert second["set_w"] == []


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_limits_known_to_the_server_reach_both_processes(framework: str, tmp_path: Path, server: ServerProcess) -> None:
    first, _ = run(framework, tmp_path, server.url)
    assert first["limits_of_steps"] == LIMITS_OF_STEPS
    again, other = run(framework, tmp_path, server.url)
    assert again["limits_of_steps"] == [BEST_W] * 4 * PER_EPOCH
    assert again["chosen_limit_w"] == other["chosen_limit_w"] == BEST_W
    assert again["profile"] == other["profile"] == first["profile"]
    with BsoClient(server.url) as client:
        trials = client.show_job("digits-limits").trials
    assert [(trial.power_limit_w, trial.power_limits) for trial in trials] == [(BEST_W, 4)] * 2
