"""Machines and GPUs of processes under launchers that provide no placement."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.fake_trainer import FakeTrainer, on_each_rank
from tests.support.frameworks import Work
from tests.support.job_bench import NEVER, CountingMonitor
from tests.support.process_end import leave
from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess
from tests.support.warm import LIGHTNING, TRANSFORMERS
from zeus_plugins.client.http import BsoClient
from zeus_plugins.dataloader import loader
from zeus_plugins.energy import EstimateMonitor, NvmlMonitor, estimate
from zeus_plugins.placement import Placement, placed, this_machine
from zeus_plugins.training.energy_run import EnergyRun
from zeus_plugins.training.port import node_monitor

UUIDS = tuple(f"{letter * 8}-0000-0000-0000-000000000000" for letter in "abcdefgh")


def places(machines: str, *, gpus_per_rank: Sequence[Sequence[str]]) -> list[Placement | Exception]:
    """Place ranks on machines, given as one letter per rank."""

    def place(port: FakeTrainer) -> Placement:
        port.local_rank = 0  # the value of a launcher without placement
        port.machine, port.own_gpus, port.gpu_indices = machines[port.rank], gpus_per_rank[port.rank], [0]
        return placed(port)

    return on_each_rank(len(machines), place)


@pytest.mark.parametrize(
    ("machines", "firsts", "gpus"), [("XXYY", [0, 2], [(0, 1), (2, 3)]), ("XYXY", [0, 1], [(0, 2), (1, 3)])]
)
def test_first_process_of_each_machine_measures_the_gpus_of_all_local_processes(
    machines: str, firsts: list[int], gpus: list[tuple[int, ...]]
) -> None:
    gpus_of = {machine: tuple(UUIDS[gpu] for gpu in own) for machine, own in zip("XY", gpus, strict=True)}
    # All ranks are threads of this process.
    own = (os.getpid(),) * 2
    assert places(machines, gpus_per_rank=[[uuid] for uuid in UUIDS[:4]]) == [
        Placement(rank in firsts, machines=2, gpus=gpus_of[machine], processes=own)
        for rank, machine in enumerate(machines)
    ]


def test_two_ranks_that_share_a_gpu_measure_that_gpu_only() -> None:
    found = places("XX", gpus_per_rank=[UUIDS[1:2], UUIDS[1:2]])
    assert [each.gpus for each in found if isinstance(each, Placement)] == [UUIDS[1:2]] * 2


@pytest.mark.parametrize(
    ("local_rank", "current", "count", "own"),
    [(0, 0, 2, UUIDS[:1]), (1, 0, 2, ()), (1, 1, 2, UUIDS[1:2]), (1, 0, 1, UUIDS[:1])],
    ids=["first rank", "has not chosen", "has chosen", "sees one GPU"],
)
def test_rank_of_a_plain_script_names_the_gpu_that_it_has_chosen(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, current: int, count: int, own: Sequence[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(loader, "cuda_devices", lambda _: UUIDS[:count])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert loader._LoaderRanks(local_rank, 2).own_gpus == own


@pytest.mark.parametrize("gpus", [[(), ()], [UUIDS[:1], ()]], ids=["unknown", "one has not chosen yet"])
def test_processes_without_known_gpus_use_the_frameworks_selection(gpus: list[Sequence[str]]) -> None:
    assert [each.gpus for each in places("XX", gpus_per_rank=gpus) if isinstance(each, Placement)] == [[0], [0]]


def test_single_process_gathers_nothing() -> None:
    port = FakeTrainer()
    port.gpu_indices = [1]
    assert placed(port) == Placement(is_first=True, machines=1, gpus=[1])
    assert port.meetings == 0


def test_without_a_process_group_the_launcher_is_trusted() -> None:
    class Tpu(FakeTrainer):
        def all_gather(self, thing: Any) -> list[Any]:  # noqa: ARG002 - a port's signature
            raise ValueError("Default process group has not been initialized")

    port = Tpu(rank=1)
    port.world_size, port.local_rank = 2, 1
    assert placed(port) == Placement(is_first=False, machines=1, gpus=())


def test_eight_ranks_with_a_visible_gpu_each_are_measured_once() -> None:
    nvml = FakeNvml([FakeGpu(uuid=f"GPU-{uuid}") for uuid in UUIDS])

    def train(port: FakeTrainer) -> float:
        port.own_gpus, port.gpu_indices, port.local_rank = [UUIDS[port.rank]], [0], 0
        place = placed(port)
        run = EnergyRun()
        run.begin(port, NvmlMonitor(place.gpus, nvml=nvml) if place.is_first else None)
        if port.rank == 0:
            for gpu in nvml.machine:
                assert gpu.counter_mj is not None
                gpu.counter_mj += 10_000
        run.end_epoch()
        run.close()
        return run.totals.get("energy_j", 0.0)

    assert on_each_rank(8, train) == [80.0] + [0.0] * 7


def test_machine_is_identified_by_boot_id_and_torchruns_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("5b1f\n")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    here = this_machine(boot_id)
    assert here.startswith("5b1f/")
    assert this_machine(tmp_path / "none") != here
    assert this_machine(boot_id) == here
    monkeypatch.setenv("GROUP_RANK", "1")
    assert this_machine(boot_id) != here


# --- Trainings on two nodes: two real processes, each the only one of its node ----------------------------------------


JOB_ID = "digits-nodes"


@pytest.mark.parametrize(("bench", "modules"), [("lightning_bench", LIGHTNING), ("hf_bench", TRANSFORMERS)])
def test_energy_of_both_nodes_is_reported_and_logged(
    server: ServerProcess, tmp_path: Path, bench: str, modules: Sequence[str]
) -> None:
    command = ["tests.training.test_placement", bench, server.url, JOB_ID, str(tmp_path)]
    status = run_ranks(*command, modules=modules, output=tmp_path / "output", nodes=2)
    assert status == [0, 0], (tmp_path / "output").read_text()

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["steps"] == second["steps"] > 0
    with BsoClient(server.url) as client:
        view = client.show_job(JOB_ID)
    (trial,) = view.trials
    assert (trial.time_s, trial.energy_j) == (first["steps"], 2 * 10.0 * first["steps"])
    assert trial.energy_source == "2 nodes: counted steps"
    assert (view.job.number_of_gpus, view.job.max_power) == (2, 200.0)
    assert (first["metered_j"], second["metered_j"]) == (trial.energy_j, 0.0)
    assert first["open"] == second["open"] == [0, 0]


def test_estimate_counts_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gathered(FakeTrainer):
        def all_gather(self, thing: Any) -> list[Any]:  # noqa: ARG002 - a port's signature
            return [("X", (), 11), ("Y", (), 12), ("X", (), 13)]

    port = Gathered(rank=0)
    port.world_size, port.machine = 3, "X"
    place = placed(port)
    assert place.processes == (11, 13)
    asked: list[Sequence[int]] = []
    monkeypatch.setattr(estimate, "cpu_time_s", lambda others: asked.append(others) or 0.0)
    monitor = node_monitor(place, EstimateMonitor(65.0))
    monitor.begin_window("epoch")
    monitor.end_window("epoch")
    assert asked == [(11, 13)] * 2


# A process of a training on two nodes: ``python -m tests.training.test_placement BENCH SERVER_URL JOB_ID FOLDER``.

OPTIONS: dict[str, dict[str, Any]] = {
    "lightning_bench": {"num_nodes": 2, "strategy": "ddp"},
    "hf_bench": {"ddp_backend": "gloo"},
}


def main(name: str, server_url: str, job_id: str, folder: str) -> None:
    """Train two epochs with 10 J per step and node."""
    torch.set_num_threads(1)
    work = Work()
    monitors = [CountingMonitor(lambda: work.batches) for _ in range(2)]
    bench = import_module(f"tests.support.{name}").Bench(
        argparse.Namespace(url=server_url), job_id, Path(folder, "checkpoints")
    )
    job = bench.job(NEVER, batch_sizes=(48,), max_epochs=2)
    meter = bench.Energy(monitors[1])
    zeus = bench.callback(job, energy_monitor=monitors[0], on_failure="stop")
    training = bench.training(zeus, meter, work=work, epochs=2, **OPTIONS[name])
    training.train()
    told = {
        "steps": training.steps[0],
        "metered_j": meter.energy_j,
        "open": [len(each.open_windows) for each in monitors],
    }
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
