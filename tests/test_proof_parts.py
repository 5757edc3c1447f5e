"""The parts of `benchmarks.recurrences run --device gpu` and its tasks, on pretended GPUs, with shrunken models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.recurrences.harness import outcome_in
from benchmarks.recurrences.parts import (
    PARTS,
    Bench,
    Part,
    counter,
    do_parts,
    examined_apart,
    memory,
    power_limits,
    read_parts,
    sharing,
    slices,
)
from benchmarks.recurrences.power import READ, REPLAY, REPLAY_LIMIT_W, SET, ReadOnly, power_limits_of
from benchmarks.recurrences.runs import OUT_OF_MEMORY, REFUSED, Order
from benchmarks.recurrences.tasks import tasks_for
from tests.support.energy_bench import plain_environment  # noqa: F401 - a fixture
from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.servers import Server
from tests.support.simulated_gpu import SimulatedGpu, SimulatedLoad
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import NvmlMonitor
from zeus_plugins.gpu_check.examination import Examination
from zeus_plugins.power_limit import PowerLimitUnavailableError

SHRINK = 8
ROOT = Path(__file__).parent.parent
DRIVER = ROOT / "tests" / "support" / "simulated_driver" / "path"


class Counting(FakeNvml):
    """A GPU whose counter rises by a joule with each reading."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:  # noqa: N802 - NVML's own name
        assert handle.counter_mj is not None
        handle.counter_mj += 1000
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


class Here:
    """Trains in this process on pretended GPUs, through a real server."""

    def __init__(self, nvml: FakeNvml, server_url: str) -> None:
        self.nvml, self._url = nvml, server_url

    def train(self, orders: Sequence[Order]) -> list[dict[str, Any]]:
        from benchmarks.recurrences.training import trained  # imports both frameworks

        return [trained(order, self._url, NvmlMonitor(nvml=self.nvml)).to_json() for order in orders]

    def state_of(self, job_id: str, number: int) -> str:
        with BsoClient(self._url) as client:
            return client.show_job(job_id).trials[number - 1].state.name

    def bench(self, **options: Any) -> Bench:
        return Bench(self.train, self.state_of, shrink=SHRINK, nvml=self.nvml, **options)


def looking(gpu: SimulatedGpu) -> Bench:
    def ask(variables: object) -> dict[str, Any]:
        del variables
        return {"cuda": [gpu.gpu.uuid], "ours": [gpu.gpu.uuid], "problem": None}

    examination = Examination(gpu, load=lambda _: SimulatedLoad(gpu), ask=ask, clock=gpu.clock, sleep=gpu.sleep)
    return Bench(lambda _: [], lambda *_: "", nvml=gpu, examine=lambda: list(examination.results()))


@pytest.fixture
def here(plain_environment: Any, server: Server) -> Here:  # noqa: F811 - the fixture
    del plain_environment
    return Here(Counting(), server.url)


def test_a_counter_that_agrees_with_power_within_three_per_cent(plain_environment: Any) -> None:  # noqa: F811
    del plain_environment
    part = counter(looking(SimulatedGpu()))
    assert part.is_as_expected is True
    assert max(map(abs, part.details["distances"])) < 0.03
    assert "mapping by UUID: ok" in part.found


def test_a_counter_that_is_off_by_four_per_cent_is_told_of(plain_environment: Any) -> None:  # noqa: F811
    del plain_environment
    part = counter(looking(SimulatedGpu(misreads=1.04)))
    assert part.is_as_expected is False
    assert "+4.0%" in part.found


@pytest.mark.slow
def test_a_size_that_does_not_fit_is_infeasible_and_the_next_run_takes_a_smaller_one(here: Here) -> None:
    part = memory(here.bench())
    assert part.is_as_expected is True, part
    assert part.found.startswith("size 128: INFEASIBLE; then size 32: ")
    assert part.details["first"]["state"] == "out_of_memory"
    assert part.details["second"]["energy_source"] == "nvml"


@pytest.mark.slow
def test_a_job_that_has_no_size_left_is_refused_and_breaks_nothing(here: Here) -> None:
    order = Order("tabular", "refused", 0, policy="gp_voi", batch_sizes=(16,), fits=8)
    outcomes = [outcome for _ in range(2) for outcome in here.train([order])]
    assert [outcome["state"] for outcome in outcomes] == [OUT_OF_MEMORY, REFUSED]
    assert (outcomes[1]["reached"], outcomes[1]["cost_j"]) == (False, 0.0)
    assert "none of the batch sizes [16] can run any more" in outcomes[1]["detail"]


@pytest.mark.slow
def test_a_pretended_device_gets_its_cheapest_limit(here: Here) -> None:
    part = power_limits(here.bench(power_limits=REPLAY))
    assert part.is_as_expected is True, part
    assert part.details["run"]["notes"]["chosen_limit_w"] == REPLAY_LIMIT_W


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "limit_mw"), [(READ, 650_000), (SET, 650_000)])
def test_a_gpu_keeps_its_limit(here: Here, mode: str, limit_mw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(limit_mw=limit_mw)
    lowered: list[int] = []

    class Noting(Counting):
        def nvmlDeviceSetPowerManagementLimit(self, handle: FakeGpu, limit_mw: int) -> None:  # noqa: N802
            lowered.append(limit_mw)
            super().nvmlDeviceSetPowerManagementLimit(handle, limit_mw)

    nvml = Noting([gpu])
    monkeypatch.setattr(
        "benchmarks.recurrences.lightning_tasks.power_limits_of", lambda asked: power_limits_of(asked, nvml)
    )
    part = power_limits(here.bench(power_limits=mode))
    assert part.details["run"]["state"] != "broken", part.details["run"]["detail"]
    assert gpu.limit_mw == limit_mw
    assert bool(lowered) == (mode == SET)


@pytest.mark.slow
def test_two_processes_on_a_gpu_are_told_of(here: Here) -> None:
    (gpu,) = here.nvml.machine
    gpu.pids = [os.getpid(), os.getpid() + 1]
    part = sharing(here.bench())
    assert part.is_as_expected is True, part
    assert part.details["sources"] == ["nvml, shared with other processes"] * 2


def test_a_part_whose_training_ends_without_a_word_is_not_as_expected(tmp_path: Path) -> None:
    bench = Bench(lambda orders: [outcome_in(tmp_path / "none") for _ in orders], lambda *_: "FAILED")
    assert [part(bench).is_as_expected for part in (memory, power_limits, sharing)] == [False] * 3


@pytest.mark.parametrize("state", [OUT_OF_MEMORY, REFUSED])
def test_power_limits_are_not_shown_by_what_has_not_trained(state: str) -> None:
    asked: list[Order] = []

    def train(orders: Sequence[Order]) -> list[dict[str, Any]]:
        asked.extend(orders)
        return [{"state": state, "notes": {}} for _ in orders]

    parts = [power_limits(Bench(train, lambda *_: "", power_limits=mode)) for mode in (READ, SET)]
    assert [part.is_as_expected for part in parts] == [False, False]
    assert len({order.job_id for order in asked}) == 2  # the epochs are others, which no job takes


def test_a_limit_is_never_set_unasked() -> None:
    nvml = FakeNvml()
    (device,) = power_limits_of(READ, nvml).arguments["devices"]
    assert isinstance(device, ReadOnly)
    assert (device.limit_w(), device.range_w()) == (700.0, (200.0, 700.0))
    with pytest.raises(PowerLimitUnavailableError, match="--set-power-limits was not given"):
        device.set_limit_w(300.0)
    assert nvml.machine[0].limit_mw == 700_000


def test_gpus_and_slices_are_selected_by_uuid(plain_environment: Any) -> None:  # noqa: F811
    del plain_environment
    whole = FakeGpu(uuid="GPU-1")
    sliced = FakeGpu(uuid="GPU-2", mig_mode=1, slices=[3, None, None, None, 3, None, None])
    part = slices(Bench(lambda _: [], lambda *_: "", nvml=FakeNvml([whole, sliced])))
    assert part.details["sources"]["GPU-1"] == "nvml"
    assert part.details["sources"]["MIG-GPU-2"] == "estimate: 300 W by power limit × 3/7 (MIG)"
    assert part.is_as_expected is True


def test_parts_are_done_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def part(name: str) -> Any:
        def looked(bench: Bench) -> Part:
            del bench
            done.append(name)
            return Part(name, "much", "little", False, {})

        return looked

    for name in PARTS:
        monkeypatch.setitem(PARTS, name, part(name))
    bench = Bench(lambda _: [], lambda *_: "")
    for _ in range(2):
        do_parts(bench, tmp_path, lambda _: None)
    assert done == list(PARTS)
    kept = read_parts([tmp_path])
    assert [each["name"] for each in kept] == list(PARTS)
    assert kept[0] == {"name": "counter", "expected": "much", "found": "little", "is_as_expected": False, "details": {}}


@pytest.mark.slow
@pytest.mark.parametrize("task", [task.name for task in tasks_for("gpu")])
def test_each_task_of_the_gpu_trains_when_it_is_shrunken(here: Here, task: str) -> None:
    order = Order(task=task, job_id=task, seed=5, batch_size=32, epochs=1, shrink=SHRINK)
    (run,) = here.train([order])
    assert run["state"] == "max_epochs_reached", run["detail"]
    assert (run["epochs"], run["energy_source"], run["batch_size"]) == (1, "nvml", 32)
    assert run["energy_j"] > 0


def test_the_gpu_is_looked_at_by_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DRIVER), str(ROOT)]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(BenchmarkError, match="no GPU is visible"):
        examined_apart()
