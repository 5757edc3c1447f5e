"""Time and energy of successive trainings from listed measurements, without a framework."""

from __future__ import annotations

import logging

import pytest

from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.fake_trainer import FakeTrainer, on_each_rank
from tests.support.replay import ReplayMonitor
from zeus_plugins.energy import EnergyUnavailableError, EpochMeter, Measurement, NvmlMonitor
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.energy_run import EnergyRun

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="H200")


def listed(*measured: tuple[float, float]) -> ReplayMonitor:
    return ReplayMonitor([Measurement(time_s, energy_j, "replay") for time_s, energy_j in measured], GPUS)


def test_epochs_are_summed() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), listed((2.0, 100.0), (3.0, 50.0), (9.0, 9.0)))
    for epoch_s, epoch_j, time_s, energy_j in [(2.0, 100.0, 2.0, 100.0), (3.0, 50.0, 5.0, 150.0)]:
        epoch = {"zeus/epoch_time_s": epoch_s, "zeus/epoch_energy_j": epoch_j}
        assert run.end_epoch() == epoch | {"zeus/time_s": time_s, "zeus/energy_j": energy_j}
    run.close()
    assert run.totals == {"time_s": 5.0, "energy_j": 150.0}
    assert run.state() == {"time_s": 5.0, "energy_j": 150.0}


def test_checkpoint_includes_the_present_epoch() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), listed((2.0, 100.0), (1.0, 10.0), (4.0, 40.0)))
    run.end_epoch()
    assert run.state() == {"time_s": 2.0, "energy_j": 100.0, "epoch_time_s": 1.0, "epoch_energy_j": 10.0}
    epoch = {"zeus/epoch_time_s": 5.0, "zeus/epoch_energy_j": 50.0}
    assert run.end_epoch() == epoch | {"zeus/time_s": 7.0, "zeus/energy_j": 150.0}


def test_training_continues_from_a_checkpoint() -> None:
    state = {"time_s": 2.0, "energy_j": 100.0, "epoch_time_s": 1.0, "epoch_energy_j": 10.0}
    run = EnergyRun()
    run.restore(state)
    run.begin(FakeTrainer(), listed((4.0, 40.0)))
    assert run.totals == {"time_s": 2.0, "energy_j": 100.0}
    metrics = run.end_epoch()
    assert metrics is not None
    assert (metrics["zeus/epoch_time_s"], metrics["zeus/time_s"], run.totals["energy_j"]) == (5.0, 7.0, 150.0)


def test_second_begin_changes_nothing_until_the_end() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), listed((2.0, 100.0), (3.0, 50.0)))
    run.begin(FakeTrainer(), listed())
    run.end_epoch()
    assert run.totals == {"time_s": 2.0, "energy_j": 100.0}
    run.close()
    run.close()
    run.restore({})
    run.begin(FakeTrainer(), listed((1.0, 1.0)))
    run.end_epoch()
    assert run.totals == {"time_s": 1.0, "energy_j": 1.0}


def test_machines_synchronize_at_the_begin_and_end_of_an_epoch() -> None:
    def train(port: FakeTrainer) -> dict[str, float]:
        port.machine = f"node {port.rank}"
        run = EnergyRun()
        run.begin(port, listed((2.0, 100.0), (3.0, 50.0)))
        assert port.meetings == 3  # gathering places, creating the monitor, and before the first window
        assert run.is_measuring is (port.rank == 0)
        run.end_epoch()
        assert port.meetings == 4
        run.close()
        assert not run.is_measuring
        return run.totals

    assert on_each_rank(2, train) == [{"time_s": 2.0, "energy_j": 200.0}, {}]


# --- Monitors that fail during a training -----------------------------------------------------------------------------


@pytest.fixture
def driver() -> FakeNvml:
    return FakeNvml([FakeGpu(), FakeGpu(uuid="GPU-1")])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spend(driver: FakeNvml, clock: Clock, time_s: float, power_w: float) -> None:
    """Advance the clock while each present GPU draws `power_w` watts."""
    clock.now_s += time_s
    for gpu in driver.machine:
        if gpu.counter_mj is not None:
            gpu.counter_mj += round(power_w * time_s * 1000)


def metered(driver: FakeNvml, clock: Clock) -> EpochMeter:
    meter = EpochMeter(NvmlMonitor(nvml=driver, clock=clock), clock=clock)
    meter.begin()
    return meter


def test_lost_gpu_ends_no_training_and_counts_with_the_former_power(
    driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zeus_plugins.energy")
    meter = metered(driver, clock)
    spend(driver, clock, 10.0, 150.0)
    assert meter.end_epoch()["zeus/epoch_energy_j"] == 3000.0
    lost = driver.machine[1]
    known_mj, lost.counter_mj = lost.counter_mj, None
    for _ in range(2):
        spend(driver, clock, 4.0, 150.0)
        metrics = meter.end_epoch()
        assert (metrics["zeus/epoch_time_s"], metrics["zeus/epoch_energy_j"]) == (4.0, 1200.0)
    lost.counter_mj = known_mj  # the driver was reloaded
    spend(driver, clock, 1.0, 100.0)
    meter.end_epoch()
    spend(driver, clock, 2.0, 200.0)
    assert meter.end_epoch() == {
        "zeus/epoch_time_s": 2.0,
        "zeus/epoch_energy_j": 800.0,
        "zeus/time_s": 21.0,
        "zeus/energy_j": 3000.0 + 2 * 1200.0 + 300.0 + 800.0,
    }
    meter.end()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    (warning,) = [message for level, message in told if level == "WARNING"]
    assert "can no longer be measured (GPU 1 (NVIDIA H200) gives no energy counter: Not Supported." in warning
    assert warning.endswith("until the monitor works again it is taken to draw 300 W")
    assert [message for level, message in told if level == "INFO"] == [
        "energy of the training: nvml",
        "energy of the training: estimate: 300 W, as it cannot be measured",
        "energy of the training: nvml",
    ]


def test_gpu_lost_in_the_first_epoch_counts_with_maximum_power(driver: FakeNvml, clock: Clock) -> None:
    meter = metered(driver, clock)
    driver.machine[0].counter_mj = None
    spend(driver, clock, 2.0, 100.0)
    assert meter.state() == {"time_s": 0.0, "energy_j": 0.0, "epoch_time_s": 2.0, "epoch_energy_j": 2 * 1400.0}


def test_unknown_energy_is_reported(driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zeus_plugins.energy")
    meter = metered(driver, clock)
    driver.machine[0].counter_mj = driver.machine[0].max_power_mw = None
    spend(driver, clock, 2.0, 100.0)
    assert meter.end_epoch()["zeus/epoch_energy_j"] == 0.0
    assert "until the monitor works again its energy counts for nothing, as its power is not known" in caplog.text
    assert "energy of the training: unknown, so 0 J, as it cannot be measured" in caplog.text
    meter.end()


class Stubborn(ReplayMonitor):
    """Fail once at the end of a window, which stays open."""

    has_failed = False

    def end_window(self, name: str) -> Measurement:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("uninitialized")
        return super().end_window(name)


def test_unclosed_window_does_not_prevent_the_next_measurement() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), Stubborn([Measurement(2.0, 100.0, "replay")], GPUS))
    run.end_epoch()
    metrics = run.end_epoch()
    assert metrics is not None
    assert metrics["zeus/epoch_energy_j"] == 100.0


def test_monitor_failing_at_the_begin_of_a_training_is_an_error(driver: FakeNvml) -> None:
    driver.machine[0].counter_mj = None
    with pytest.raises(EnergyUnavailableError, match="gives no energy counter"):
        metered(driver, Clock())
