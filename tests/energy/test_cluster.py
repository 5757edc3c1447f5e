"""A training over several nodes, with threads as ranks; tests/training/test_placement.py has real processes."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.fake_nvml import Clock
from tests.support.fake_trainer import FakeTrainer, on_each_rank
from zeus_plugins.energy import ClusterMonitor, EnergyUnavailableError, EstimateMonitor, Measurement
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

MODEL = "Tesla P100"
POWER_W = {0: 100.0, 1: 40.0}


class FailsOnce(EstimateMonitor):
    """A monitor with an unmeasurable second window."""

    def __init__(self, power_w: float, clock: Clock) -> None:
        super().__init__(power_w, device_model=MODEL, clock=clock)
        self.ended = 0

    def end_window(self, name: str) -> Measurement:
        self.ended += 1
        measured = super().end_window(name)
        if self.ended == 2:
            raise EnergyUnavailableError("GPU 0 is lost")
        return measured


def play(scene: str) -> list[Any]:
    """Play a scene on two nodes; return the observations of each."""

    def train(port: FakeTrainer) -> dict[str, Any]:
        rank, clock = port.rank, Clock()

        def measure() -> EstimateMonitor:
            if scene == "a node that cannot measure" and rank == 1:
                raise EnergyUnavailableError("no GPU is visible")
            if scene == "a node that fails" and rank == 1:
                return FailsOnce(POWER_W[rank], clock)
            model = "Tesla V100" if scene == "other GPUs" and rank == 1 else MODEL
            return EstimateMonitor(POWER_W[rank], device_model=model, clock=clock)

        try:
            monitor = ClusterMonitor(measure, rank=rank, all_gather=port.all_gather, clock=clock)
        except (EnergyUnavailableError, ZeusBSOConfigError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        told = {"windows": windows(monitor, rank, clock), "gpus": monitor.gpus().model_dump()}
        monitor.close()
        monitor.close()
        return told

    return on_each_rank(2, train)


def windows(monitor: ClusterMonitor, rank: int, clock: Clock) -> list[Any]:
    """Return three adjacent windows; the second ends between two meetings of the ranks."""
    measured: list[Measurement] = []

    def turn() -> None:
        if rank == 0:
            if measured or clock.now_s > 1000.0:
                measured.append(monitor.end_window("trial"))
            monitor.begin_window("trial")

    monitor.synchronize()
    turn()
    clock.now_s += 2.0
    monitor.synchronize()
    turn()
    clock.now_s += 3.0
    turn()
    clock.now_s += 5.0
    monitor.synchronize()
    turn()
    return [[each.time_s, each.energy_j, each.source] for each in measured]


def test_rank_0_measures_the_energy_of_all_nodes() -> None:
    first, second = play("all goes well")
    source = "2 nodes: estimate: 100 W stated, estimate: 40 W stated"
    assert first["windows"] == [
        [2.0, 2 * (100.0 + 40.0), source],
        [3.0, 3 * 100.0, source],  # the next meeting adds the other node's share
        [5.0, 5 * (100.0 + 40.0) + 3 * 40.0, source],
    ]
    assert first["gpus"] == second["gpus"] == {"max_power": 140.0, "number_of_gpus": 2, "gpu_model": "Tesla P100"}
    assert second["windows"] == []


@pytest.mark.parametrize(
    ("scene", "error"),
    [
        ("a node that cannot measure", "EnergyUnavailableError: no GPU is visible. To estimate"),
        ("other GPUs", r"ZeusBSOConfigError: the nodes' GPUs are of several models (Tesla P100, Tesla V100)"),
    ],
)
def test_failure_of_a_node_is_reported_by_all_nodes(scene: str, error: str) -> None:
    for told in play(scene):
        assert told["error"].startswith(error)


def test_temporarily_failing_node_counts_with_maximum_power() -> None:
    first, _ = play("a node that fails")
    failed = "2 nodes: estimate: 100 W stated, estimate: 40 W for a node that failed to measure"
    assert first["windows"][0][1] == 280.0
    assert first["windows"][2] == [5.0, 5 * (100.0 + 40.0) + 3 * 40.0, failed]


def test_window_over_two_exchanges_names_the_estimate_of_the_first() -> None:
    clock = Clock()
    shares = iter([[None, None], [None, None], [None, Measurement(1.0, 40.0, "nvml")]])
    devices = GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="A40")
    gathered = iter([[devices, devices], *shares])
    monitor = ClusterMonitor(
        lambda: EstimateMonitor(100.0, device_model="A40", clock=clock),
        rank=0,
        all_gather=lambda _: next(gathered),
        clock=clock,
    )
    monitor.synchronize()
    monitor.begin_window("trial")
    for _ in range(2):
        clock.now_s += 1.0
        monitor.synchronize()
    measured = monitor.end_window("trial")
    assert measured.energy_j == 2 * 100.0 + 100.0 + 40.0
    assert measured.source == "2 nodes: estimate: 100 W stated, estimate: 100 W for a node that failed to measure, nvml"


def test_later_ranks_have_no_windows() -> None:
    monitor = ClusterMonitor(
        lambda: EstimateMonitor(10.0, device_model="A40"), rank=1, all_gather=lambda told: [told, told]
    )
    assert monitor.gpus().gpu_model == "A40"
    with pytest.raises(ZeusBSOConfigError, match="this is rank 1: rank 0 measures for all nodes"):
        monitor.begin_window("trial")


def test_permanently_failing_node_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    class Lost(EstimateMonitor):
        def begin_window(self, name: str) -> None:
            raise EnergyUnavailableError(f"GPU 0 is lost ({name})")

    monitor = ClusterMonitor(lambda: Lost(10.0, device_model="A40"), rank=1, all_gather=lambda told: [told, told])
    for _ in range(3):
        monitor.synchronize()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(
        "this node's energy cannot be measured, its maximum power is taken instead: GPU 0 is lost"
    )
