"""Money and CO2 at stated rates, and variables that are no longer read."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.replay import ReplayMonitor
from zeus_plugins.cli import main
from zeus_plugins.energy import EpochMeter, Measurement
from zeus_plugins.energy.meter import Rates
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="H200")
KWH = 3.6e6

TABLE = (
    "no longer names a table: set it to the mean rate, or unset it and multiply the logged zeus/epoch_energy_j by your"
)


def test_money_and_co2_follow_the_stated_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rates().of(2 * KWH) == {}
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "0.30")
    monkeypatch.setenv("ZEUS_CO2_G_PER_KWH", "380")
    assert Rates().of(2 * KWH) == {"money": pytest.approx(0.6), "co2_g": pytest.approx(760.0)}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("ZEUS_PRICE_PER_KWH", "cheap", "ZEUS_PRICE_PER_KWH is 'cheap'"),
        ("ZEUS_PRICE_PER_KWH", "prices.csv", f"ZEUS_PRICE_PER_KWH {TABLE}"),
        ("ZEUS_CO2_G_PER_KWH", "CO2.CSV", f"ZEUS_CO2_G_PER_KWH {TABLE}"),
        ("ZEUS_PUE", "1.2", "ZEUS_PUE is no longer read: unset it; multiply ZEUS_PRICE_PER_KWH and"),
    ],
)
def test_unusable_rate_is_an_error_at_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ZeusBSOConfigError, match=problem):
        Rates()


def test_amounts_of_a_checkpoint_are_continued_at_the_present_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "3.6")
    state = {"time_s": 1.0, "energy_j": 1e6, "epoch_time_s": 0.0, "epoch_energy_j": 0.0}
    for before, after in (({}, 2.0), ({"money": 5.0, "co2_g": 7.0}, 6.0)):
        meter = EpochMeter(ReplayMonitor([Measurement(1.0, 1e6, "replay")] * 2, GPUS), state | before)
        meter.begin()
        told = meter.end_epoch()
        assert (told["zeus/money"], "zeus/co2_g" in told) == (pytest.approx(after), False)


def test_command_reports_the_money(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(counter_mj=None, power_mw=100_000)]))
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "0.36")
    arguments = ["energy", "--json", "--", "sleep", "0.05"]
    assert main(arguments) == 0
    told = json.loads(capfd.readouterr().err)
    assert told["money"] == pytest.approx(told["energy_j"] * 1e-7)
    assert main([each for each in arguments if each != "--json"]) == 0
    assert re.search(r", money [\de.-]+$", capfd.readouterr().err.rstrip())


def test_invalid_price_is_refused_before_the_command_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "-1")
    assert main(["energy", "--", "echo", "run"]) == 125
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "ZEUS_PRICE_PER_KWH is '-1'" in printed.err
