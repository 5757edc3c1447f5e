"""One rank of a training over two nodes, each with one process; run by tests/energy/test_cluster.py.

Play all scenes, and write the observations into the given folder. Rank and addresses come from the
environment, as torchrun sets them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.fake_nvml import Clock
from zeus_plugins.energy import ClusterMonitor, EnergyUnavailableError, EstimateMonitor, Measurement
from zeus_plugins.errors import ZeusBSOConfigError

SCENES = ("all goes well", "a node that cannot measure", "other GPUs", "a node that fails")
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


def all_gather(thing: object) -> Sequence[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered


def play(scene: str) -> dict[str, Any]:
    """Play a scene; return the observations of this rank."""
    rank = dist.get_rank()
    clock = Clock()

    def measure() -> EstimateMonitor:
        if scene == "a node that cannot measure" and rank == 1:
            raise EnergyUnavailableError("no GPU is visible")
        if scene == "a node that fails" and rank == 1:
            return FailsOnce(POWER_W[rank], clock)
        model = "Tesla V100" if scene == "other GPUs" and rank == 1 else MODEL
        return EstimateMonitor(POWER_W[rank], device_model=model, clock=clock)

    try:
        monitor = ClusterMonitor(measure, rank=rank, all_gather=all_gather, clock=clock)
    except (EnergyUnavailableError, ZeusBSOConfigError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    told = {"windows": windows(monitor, rank, clock), "gpus": monitor.gpus().model_dump()}
    monitor.close()
    monitor.close()
    return told


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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stories = {scene: play(scene) for scene in SCENES}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(stories))
    dist.destroy_process_group()
