"""Time and energy of one training after another, against listed measurements; no framework."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_trainer import FakeTrainer
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.energy_run import EnergyRun

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="H200")


def listed(*measured: tuple[float, float]) -> ReplayMonitor:
    return ReplayMonitor([Measurement(time_s, energy_j, "replay") for time_s, energy_j in measured], GPUS)


class SecondRank(FakeTrainer):
    """Another process than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = self.local_rank = 1


class Nodes(FakeTrainer):
    """The first process of a training on several machines, which counts when they meet."""

    spans_nodes = True
    meetings = 0

    def all_gather(self, thing: Any) -> list[Any]:
        self.meetings += 1
        return super().all_gather(thing)


def test_epochs_add_up() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), listed((2.0, 100.0), (3.0, 50.0), (9.0, 9.0)))
    assert run.end_epoch() == {
        "zeus/epoch_time_s": 2.0,
        "zeus/epoch_energy_j": 100.0,
        "zeus/time_s": 2.0,
        "zeus/energy_j": 100.0,
    }
    assert run.end_epoch() == {
        "zeus/epoch_time_s": 3.0,
        "zeus/epoch_energy_j": 50.0,
        "zeus/time_s": 5.0,
        "zeus/energy_j": 150.0,
    }
    run.close()
    assert (run.time_s, run.energy_j) == (5.0, 150.0)
    assert run.state() == {"time_s": 5.0, "energy_j": 150.0}


def test_a_checkpoint_keeps_the_present_epoch() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), listed((2.0, 100.0), (1.0, 10.0)))
    run.end_epoch()
    assert run.state() == {"time_s": 2.0, "energy_j": 100.0, "epoch_time_s": 1.0, "epoch_energy_j": 10.0}


@pytest.mark.parametrize("is_restored", [True, False], ids=["restored before it begins", "given when it begins"])
def test_a_training_goes_on_from_a_checkpoint(is_restored: bool) -> None:
    state = {"time_s": 2.0, "energy_j": 100.0, "epoch_time_s": 1.0, "epoch_energy_j": 10.0}
    run = EnergyRun()
    if is_restored:
        run.restore(state)
    run.begin(FakeTrainer(), listed((4.0, 40.0)), None if is_restored else state)
    assert (run.time_s, run.energy_j) == (2.0, 100.0)
    metrics = run.end_epoch()
    assert metrics is not None
    assert (metrics["zeus/epoch_time_s"], metrics["zeus/time_s"], run.energy_j) == (5.0, 7.0, 150.0)


def test_beginning_again_changes_nothing_until_the_end() -> None:
    run = EnergyRun()
    run.begin(FakeTrainer(), listed((2.0, 100.0), (3.0, 50.0)))
    run.begin(FakeTrainer(), listed(), {"time_s": 9.0, "energy_j": 9.0})
    run.end_epoch()
    assert (run.time_s, run.energy_j) == (2.0, 100.0)
    run.close()
    run.close()
    run.restore({})
    run.begin(FakeTrainer(), listed((1.0, 1.0)))
    run.end_epoch()
    assert (run.time_s, run.energy_j) == (1.0, 1.0)


def test_other_processes_than_the_first_measure_nothing() -> None:
    run = EnergyRun()
    run.begin(SecondRank(), listed())
    assert run.end_epoch() is None
    assert (run.is_measuring, run.time_s, run.state()) == (False, 0.0, {})


def test_several_machines_are_together_when_an_epoch_begins_and_ends() -> None:
    nodes, run = Nodes(), EnergyRun()
    run.begin(nodes, listed((2.0, 100.0), (3.0, 50.0)))
    assert nodes.meetings == 2  # when their monitor is made, and before the first window
    assert run.is_measuring
    run.end_epoch()
    assert nodes.meetings == 3
    assert (run.time_s, run.energy_j) == (2.0, 100.0)
    run.close()
    assert not run.is_measuring
