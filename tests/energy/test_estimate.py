"""Estimates from the CPU time of a training's processes, and waiting on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.fake_nvml import Clock
from zeus_plugins.energy import EstimateMonitor, estimate, processes
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.energy.processes import Waiting, cpu_time_s, reports_cpu_time, waits_s
from zeus_plugins.protocol import is_estimated, is_time_alone

BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True); input()"


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU seconds of this process on a machine with four cores, changeable by a test."""
    known = [100.0]
    monkeypatch.setattr(estimate, "cpu_time_s", lambda _others: known[0])
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # as PYTHON_CPU_COUNT=1 does
    monkeypatch.setattr("zeus_plugins.energy.estimate.os.sysconf", lambda _: 4)
    return known


def measured(monitor: EstimateMonitor, clock: Clock, spent: list[float], cpu_s: float, time_s: float) -> Measurement:
    monitor.begin_window("epoch")
    clock.now_s += time_s
    spent[0] += cpu_s
    return monitor.end_window("epoch")


def test_cpu_time_over_cores_is_the_share_of_full_power(spent: list[float]) -> None:
    clock = Clock()
    monitor = EstimateMonitor(80.0, clock=clock)
    source = "estimate: 80 W stated × CPU time / 4 cores"
    assert measured(monitor, clock, spent, 6.0, 10.0) == Measurement(10.0, 120.0, source)
    # Other load on the machine prolongs the same work without adding energy.
    assert measured(monitor, clock, spent, 6.0, 30.0) == Measurement(30.0, 120.0, source)
    assert monitor.source == source


@pytest.mark.parametrize("reason", ["no CPU time", "GPU named", "GPU stated", "GPU started"])
def test_estimate_without_cpu_time_or_with_a_gpu_uses_elapsed_time(
    reason: str, spent: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monitor = EstimateMonitor(
        80.0,
        device_model="Gaudi 3" if reason == "GPU named" else None,
        on_cpu=False if reason == "GPU stated" else None,
        clock=clock,
    )
    if reason == "no CPU time":
        monitor.include([1])  # a process that a system without /proc does not show
        for function in (processes.cpu_time_s, processes.reports_cpu_time):
            monkeypatch.setattr(estimate, function.__name__, partial(function, proc=Path("/nowhere")))
    monitor.begin_window("epoch")
    if reason == "GPU started":
        cuda = SimpleNamespace(is_initialized=lambda: True)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    clock.now_s += 10.0
    spent[0] += 1.0
    assert monitor.end_window("epoch") == Measurement(10.0, 800.0, "estimate: 80 W stated")
    assert monitor.source == "estimate: 80 W stated"


def test_worker_counts_while_alive_and_after_the_end() -> None:
    before = cpu_time_s()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        alive = cpu_time_s()
        worker.communicate(b"\n")
    ended = cpu_time_s()
    assert before is not None
    assert alive is not None
    assert ended is not None
    assert 0.3 < alive - before < ended - before + 0.1
    assert ended - before > 0.35


def process(proc: Path, pid: int, parent: int, ticks: tuple[int, int, int, int]) -> None:
    times = " ".join(map(str, ticks))
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b (c) S {parent} 0 0 0 0 0 0 0 0 0 {times} 20 0", "utf-8")


def test_sibling_ranks_and_workers_count_once(tmp_path: Path) -> None:
    own, hertz = os.getpid(), os.sysconf("SC_CLK_TCK")
    process(tmp_path, own, 1, (9999, 9999, 9999, 9999))  # read by finer clocks
    process(tmp_path, 70001, own, (1, 2, 0, 0))
    process(tmp_path, 70002, 1, (10, 20, 30, 40))
    process(tmp_path, 70003, 70002, (100, 0, 0, 0))
    process(tmp_path, 70004, 1, (1000, 1000, 1000, 1000))  # an unrelated process
    (tmp_path / "70005").mkdir()  # has just ended
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").touch()
    alone, both = (cpu_time_s(others, tmp_path) for others in ((), (own, 70001, 70002)))
    assert alone is not None
    assert both is not None
    assert both - alone == pytest.approx(200 / hertz, abs=0.05)


def test_sibling_ranks_require_proc(tmp_path: Path) -> None:
    assert reports_cpu_time((os.getpid(),), tmp_path)
    assert not reports_cpu_time((os.getpid(), 70002), tmp_path)
    assert cpu_time_s((70002,), tmp_path) is None


# ---- Waiting for a core --------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of a machine, and the seconds that its second thread has waited; None if the system does not count."""
    known = SimpleNamespace(now_s=0.0, waited_s=0.0)
    monkeypatch.setattr(processes, "waits_s", lambda: None if known.waited_s is None else {1: 3.0, 2: known.waited_s})
    monkeypatch.setattr(time, "monotonic", lambda: known.now_s)
    return known


@pytest.mark.parametrize(
    ("waited_s", "time_s", "expected_s"),
    [
        (3.0, 10.0, 3.0),
        (3.0, 7.5, 0.5),  # the monitor's clock has left out 2.5 s of the time
        (3.0, 2.0, 0.0),
        (3.0, 99.0, 3.0),
        (None, 10.0, None),  # another system than Linux
    ],
)
def test_waiting_is_counted(
    machine: SimpleNamespace, waited_s: float | None, time_s: float, expected_s: float | None
) -> None:
    waiting = Waiting()
    machine.waited_s = None if waited_s is None else 50.0
    waiting.begin()
    machine.now_s = 10.0
    machine.waited_s = None if waited_s is None else 50.0 + waited_s
    assert waiting.end(time_s) == expected_s


def test_each_thread_is_counted_separately(tmp_path: Path) -> None:
    for thread, nanoseconds in ((7, 1_500_000_000), (8, 0)):
        task = tmp_path / "self/task" / str(thread)
        task.mkdir(parents=True)
        task.joinpath("schedstat").write_text(f"99 {nanoseconds} 3\n")
    (tmp_path / "self/task/9").mkdir()  # the thread ends at this moment
    assert waits_s(tmp_path) == {7: 1.5, 8: 0.0}
    assert waits_s(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("source", "estimated", "time_alone"),
    [
        (None, False, False),
        ("nvml", False, False),
        ("estimate: 65 W stated", True, True),
        ("2 nodes: estimate: 300 W by power limit × 3/7 (MIG)", True, True),
        ("estimate: 65 W assumed × CPU time / 8 cores", True, False),
        ("nvml + estimate: 312 W, as it cannot be measured", True, False),
        ("estimate: 65 W stated + estimate: 80 W stated", True, False),
        ("rapl, but estimate: 70 W for 1 of 2 devices, whose counter does not count", True, False),
    ],
)
def test_source_reveals_whether_energy_is_estimated(source: str | None, estimated: bool, time_alone: bool) -> None:
    assert (is_estimated(source), is_time_alone(source)) == (estimated, time_alone)
