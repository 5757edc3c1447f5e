"""`ZeusDataLoader` finds the power limit of a replayed machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from zeus_plugins.dataloader.loader import ZeusDataLoader
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import PowerLimitProfile, ReplayMachine, ReplayPoint

# Cost per step at η = 0.5 and 200 W at most: 150 W 1.2·(75 + 100) = 210 J; 175 W 183.75 J; 200 W 1·(100 + 100) = 200 J.
TABLE = {150.0: ReplayPoint(1.2, 150.0), 175.0: ReplayPoint(1.05, 150.0), 200.0: ReplayPoint(1.0, 200.0)}
STEPS = 20


def trained(
    directory: Path, machine: ReplayMachine, *, epochs: int = 3, fails: bool = False, **environ: str
) -> list[float]:
    """The limits in force at the end of each step."""
    required = {"ZEUS_TARGET_METRIC": "1", "ZEUS_LOG_DIR": str(directory), "ZEUS_PROFILE_PARAMS": "1,4"}
    loader: ZeusDataLoader[Any] = ZeusDataLoader(
        TensorDataset(torch.arange(float(STEPS))),
        1,
        max_epochs=epochs,
        monitor=machine.monitor,
        devices=machine.devices,
        environ=required | environ,
    )
    limits = []
    for _ in loader.epochs():
        for _ in loader:
            machine.train()
            limits.append(machine.devices[0].limit_w())
        if fails:
            raise RuntimeError("the data are gone")
        loader.report_metric(0.0)
    return limits


def result_of(directory: Path) -> Any:
    return json.loads((directory / "rec01+try01+bs1.train.json").read_text())


def test_the_best_limit_is_found_kept_and_given_back(tmp_path: Path) -> None:
    machine = ReplayMachine(TABLE)
    limits = trained(tmp_path, machine)
    assert limits[:15] == [200.0] * 5 + [175.0] * 5 + [150.0] * 5
    assert limits[15:] == [175.0] * (3 * STEPS - 15)
    assert machine.devices[0].limit_w() == 200.0
    result = result_of(tmp_path)
    assert result["power_limit_w"] == 175.0
    assert result["time"] == pytest.approx(5 * 1.0 + 5 * 1.05 + 5 * 1.2 + 45 * 1.05)
    profile = PowerLimitProfile.load(tmp_path / "bs1.power.json")
    assert profile.limits_w == (150.0, 175.0, 200.0)


def test_a_later_run_in_the_same_directory_pays_for_no_profile(tmp_path: Path) -> None:
    trained(tmp_path, ReplayMachine(TABLE))
    assert set(trained(tmp_path, ReplayMachine(TABLE), epochs=1)) == {175.0}


def test_an_observer_keeps_the_limit_and_counts_as_if_the_best_were_in_force(tmp_path: Path) -> None:
    trained(tmp_path, ReplayMachine(TABLE))
    machine = ReplayMachine(TABLE)
    assert set(trained(tmp_path, machine, epochs=2, ZEUS_USE_OPTIMAL_PL="False")) == {200.0}
    result = result_of(tmp_path)
    assert result["time"] == pytest.approx(2 * STEPS * 1.05)
    assert result["energy"] == pytest.approx(2 * STEPS * 1.05 * 150)
    assert result["power_limit_w"] == 175.0


def test_a_crash_gives_the_limit_back(tmp_path: Path) -> None:
    machine = ReplayMachine(TABLE)
    with pytest.raises(RuntimeError, match="the data are gone"):
        trained(tmp_path, machine, fails=True)
    assert machine.devices[0].limit_w() == 200.0


def test_without_parameters_no_limit_is_touched(tmp_path: Path) -> None:
    machine = ReplayMachine(TABLE)
    assert set(trained(tmp_path, machine, ZEUS_PROFILE_PARAMS="")) == {200.0}
    assert "power_limit_w" not in result_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("ZEUS_PROFILE_PARAMS", "10"), ("ZEUS_PROFILE_PARAMS", "a,b"), ("ZEUS_USE_OPTIMAL_PL", "yes")]
)
def test_variables_that_cannot_be_read_are_told(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"{name} is '{value}'"):
        trained(tmp_path, ReplayMachine(TABLE), **{name: value})
