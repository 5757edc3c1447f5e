"""Emissions in the formats of CodeCarbon and of Hugging Face's model cards."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest
import yaml

from tests.support.fake_trainer import FakeTrainer
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.energy.emissions import COLUMNS
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.energy_run import EnergyRun
from zeus_plugins.training.trial import TrialInfo

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="H200")
TRIAL = TrialInfo(job_id="a", batch_size=8, trial_number=1, time_s=60.0, energy_j=3_600_000.0, energy_source='nvml "x"')


def train() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), ReplayMonitor([Measurement(20.0, 1_800_000.0, "replay")] * 3, GPUS))
    run.end_epoch()
    run.end_epoch()
    run.close()


def test_each_training_appends_a_row_with_the_columns_of_codecarbon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "emissions.csv"
    monkeypatch.setenv("ZEUS_EMISSIONS_FILE", str(file))
    monkeypatch.setenv("ZEUS_CO2_G_PER_KWH", "400")
    train()
    monkeypatch.delenv("ZEUS_CO2_G_PER_KWH")
    train()
    with file.open(newline="") as lines:
        first, second = csv.DictReader(lines)
    assert tuple(first) == COLUMNS
    assert [float(first[name]) for name in ("duration", "energy_consumed", "emissions")] == [40.0, 1.0, 0.4]
    assert float(first["emissions_rate"]) == pytest.approx(0.01)
    assert (second["energy_consumed"], second["emissions"]) == ("1.0", "")


def test_row_has_the_emissions_of_ended_epochs_below_a_heading_of_a_file_that_was_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "emissions.csv"
    file.touch()
    monkeypatch.setenv("ZEUS_EMISSIONS_FILE", str(file))
    monkeypatch.setenv("ZEUS_CO2_G_PER_KWH", "400")
    run = EnergyRun()
    run.begin(FakeTrainer(), ReplayMonitor([Measurement(20.0, 3_600_000.0, "replay")] * 3, GPUS))
    run.end_epoch()
    run.state()  # a checkpoint within the second epoch
    run.close()
    with file.open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert [float(row[name]) for name in ("duration", "energy_consumed", "emissions")] == [20.0, 1.0, 0.4]


def test_emissions_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZEUS_EMISSIONS_FILE", str(tmp_path / "missing" / "emissions.csv"))
    with caplog.at_level(logging.WARNING):
        train()
    assert "the emissions of the training could not be written" in caplog.text


def test_model_card_has_the_grams_of_the_run_at_the_stated_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_CO2_G_PER_KWH", "400")
    block = yaml.safe_load(TRIAL.model_card())["co2_eq_emissions"]
    assert block == {
        "emissions": 400,
        "source": 'zeus-plugins: 1 kWh (nvml "x") at a stated rate (ZEUS_CO2_G_PER_KWH)',
    }


def test_model_card_without_a_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEUS_CO2_G_PER_KWH", raising=False)
    with pytest.raises(ZeusBSOConfigError, match="set ZEUS_CO2_G_PER_KWH to its grams"):
        TRIAL.model_card()
