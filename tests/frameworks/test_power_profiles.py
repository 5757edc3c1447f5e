"""Beside the batch-size callback, trainings of a machine share their power-limit measurements in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import FrameworkBench, Powered
from tests.support.power_limit_bench import BEST_W, FOUND_W, LIMITS_W, is_as_the_table
from zeus_plugins.files import state_directory
from zeus_plugins.power_limit import PowerLimitProfile

STEPS = 4  # The steps of an epoch at a batch size of 48.
# Each limit is measured for a step: an epoch is enough for all of them.
AT_ONCE: dict[str, Any] = {"warmup_steps": 0, "profile_steps": 1}


def recur(
    bench: FrameworkBench, is_first: bool = True, work: Powered | None = None, zeus: Any = None, **options: Any
) -> tuple[Powered, Any]:
    """Train a recurrence with both callbacks, the power limit's before or after the batch size's.

    The recurrence reaches its target after an epoch, and the next recurrence has the same batch size.
    """
    work = work or Powered()
    power = bench.PowerLimit(**work.options(**(AT_ONCE | options)))
    other = bench.callback(bench.job(batch_sizes=(48,)), energy_monitor=zeus or work.monitor)
    bench.training(*([power, other] if is_first else [other, power]), work=work).train()
    assert work.device.limit_w() == FOUND_W
    return work, power


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_second_recurrence_measures_nothing(bench: FrameworkBench, is_first: bool) -> None:
    first, measured = recur(bench, is_first)
    assert first.limits_of_steps == list(LIMITS_W)
    assert is_as_the_table(measured.profile)
    second, known = recur(bench, is_first)
    assert second.limits_of_steps == [BEST_W] * STEPS
    assert known.profile == measured.profile
    assert bench.power_limits() == [(BEST_W, 4)] * 2


def test_profile_path_replaces_the_file_of_the_job(bench: FrameworkBench, tmp_path: Path) -> None:
    path = tmp_path / "{batch_size}.json"
    alone = Powered()
    bench.training(bench.PowerLimit(**alone.options(profile_path=path, **AT_ONCE)), work=alone, size=48).train()
    first, _ = recur(bench, profile_path=path)
    assert first.limits_of_steps == [BEST_W] * STEPS
    assert bench.power_limits() == [(BEST_W, 4)]
    assert is_as_the_table(PowerLimitProfile.load(tmp_path / "48.json"))
    assert not (state_directory() / "power-profiles").exists()
