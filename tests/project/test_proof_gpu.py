"""The hour on a GPU (`benchmarks.recurrences hour`) and its trainings, on a simulated GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recurrences.harness import State, read_records
from benchmarks.recurrences.hour import GPU_CHECK
from benchmarks.recurrences.runs import Order, Outcome
from benchmarks.recurrences.tasks import tasks_for
from benchmarks.tables import mark_of
from tests.support import ROOT
from tests.support.energy_bench import plain_environment  # noqa: F401 - a fixture
from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.servers import ServerProcess
from tests.support.simulated_driver import MAX_POWER_W, NAME, PERIOD_S, POWER_W
from zeus_plugins.energy import NvmlMonitor

pytestmark = pytest.mark.slow

DRIVER = ROOT / "tests" / "support" / "simulated_driver" / "path"
SHRINK = 8
RECURRENCES = [sys.executable, "-m", "benchmarks.recurrences"]
PATIENCE_S = 1800.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment of a machine with a simulated GPU; the folder in it identifies the machine's processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    path = os.pathsep.join([str(DRIVER), str(ROOT)])
    return kept | {"PYTHONPATH": path, "SIMULATED_GPU": str(tmp_path / "computing")}


def alive(folder: Path) -> list[int]:
    """Return the processes with a folder in their environment."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (each / "environ").read_bytes():
                found.append(int(each.name))
        except OSError:  # the process has just ended, or belongs to another user
            continue
    return found


def awaited(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: waited in vain"
        time.sleep(0.05)


def rows(page: str, name: str) -> list[list[str]]:
    """Return the cells of a table including its head."""
    table = page.partition(f"{mark_of(name)}\n")[2].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [line for line in lines if not all(re.fullmatch("-+", cell) for cell in line)]


def test_rehearsal_of_the_bundle_survives_a_kill_and_leaves_all_files_and_no_process(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    import torch  # takes seconds to load

    bundle, work, log = tmp_path / "gpu-bundle", tmp_path / "work", tmp_path / "log"
    state = work / "state"
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which would train in place of the simulated one")
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "tree").symlink_to(ROOT)
    for name in ("requirements.txt", "wheels/zeus_plugins-0.whl"):
        (bundle / name).touch()
    (bundle / "run.sh").write_bytes((ROOT / "benchmarks" / "gpu_run.sh").read_bytes())
    checksum = 2**32 - 1  # by cksum, of these empty files
    installed = work / f"packages-{sys.version_info[0]}.{sys.version_info[1]}-{checksum}"
    installed.mkdir(parents=True)
    (installed / ".complete").touch()  # the packages of this interpreter are used
    State(state)
    (state / GPU_CHECK).write_text('{"results": []}')  # a check takes minutes
    environment["PYTHON"] = sys.executable
    extent = ["--tasks", "resnet18", "--seconds", "0.3", "1", "--recurrences", "1"]
    places = ["--out", str(tmp_path), "--work", str(work)]

    def call(minutes: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            command = ["/bin/bash", str(bundle / "run.sh"), "--minutes", minutes, *places, "--rehearse", *extent]
            return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)

    # Killed at a moment when it cannot end its children, which must end nevertheless.
    killed = call("30")
    try:
        awaited(lambda: bool(read_records([state])) or killed.poll() is not None, "a training")
    finally:
        killed.kill()
    assert killed.wait() == -9, log.read_text()
    awaited(lambda: not alive(tmp_path), "the end of what was started")
    assert call("30").wait() == 0, log.read_text()
    awaited(lambda: not alive(tmp_path), "the end of what the last call had started")

    records = State(state).records
    stages = Counter(each["stage"] for each in records)
    assert (stages["warm-up"], stages["calibrate"], stages["size"]) == (1, 3, 4)
    assert {each["who"] for each in records if each["stage"] == "recurrence"} == {"default", "gp_voi"}
    assert {"gpu-state.tgz", "gpu-results.json", "gpu-page.md"} <= {each.name for each in tmp_path.iterdir()}
    assert min(each["process_j"] - each["energy_j"] for each in records) > 0
    check_energies([each for each in records if each["state"] != "bare"])
    results = json.loads((tmp_path / "gpu-results.json").read_text())
    assert results["trained_on"] == ["simulated GPU, a CPU in its place, models shrunk 8-fold"]
    assert results["machine"]["GPU"] == NAME
    check_page((tmp_path / "gpu-page.md").read_text(), records)


def check_energies(records: list[dict[str, Any]]) -> None:
    """Assert that energies come from the counter, without an estimate and without foreign processes."""
    assert {record["energy_source"] for record in records} == {"nvml"}
    for record in records:
        # Whole steps of the counter, within the life of the process. The time between readings of counter and clock
        # depends on the machine, so that energy and time are not compared.
        counted, windows = record["energy_j"] / (POWER_W * PERIOD_S), record["epochs"] + 2
        assert counted == pytest.approx(round(counted), rel=0, abs=1e-6)
        assert 0 < counted <= record["process_s"] / PERIOD_S + windows
        assert 0 < record["time_s"] <= record["process_s"]
        assert record["cost_j"] == pytest.approx(0.5 * record["energy_j"] + 0.5 * MAX_POWER_W * record["time_s"])


def check_page(page: str, records: list[dict[str, Any]]) -> None:
    """Assert that the rows have the measured values and mark the simulated GPU."""
    head, *lines = rows(page, "gpu")
    assert head[3] == "energy, kJ (simulated GPU: nvml)"
    for line, who in zip(lines, ("gp_voi", "default"), strict=True):
        tried = [each for each in records if (each["stage"], each["who"]) == ("recurrence", who)]
        assert all(line)
        assert line[:2] == ["resnet18", "1, 1"]
        assert int(line[head.index("trainings")]) == len(tried)
        if line[head.index("given up")] == "0":
            assert float(line[3]) == three_digits(sum(each["energy_j"] for each in tried) / 1000)
    head, line = rows(page, "gpu-sizes")
    assert head[0] == "cost until the target, J (simulated GPU: nvml)"
    of_size = {each["who"]: each for each in records if each["stage"] == "size"}
    for size, cell in zip(head[2:], line[2:], strict=True):
        assert (cell == "∞") == (not of_size[size]["reached"])
        assert cell == "∞" or float(cell.strip("*")) == three_digits(of_size[size]["cost_j"])
    head, *lines = rows(page, "gpu-hour")
    assert head[1] == "energy counted (simulated GPU: nvml)"
    ways = r"all; above \d+ W, idle before CUDA starts; above \d+ W, idle with a CUDA context; all of the processes, .*"
    assert re.fullmatch(ways, "; ".join(line[1] for line in lines))
    assert "**No figure of a GPU exists.**" in page


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


class Counting(FakeNvml):
    """A GPU with a counter that rises by a joule per reading."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:  # noqa: N802 - NVML's own name
        assert handle.counter_mj is not None
        handle.counter_mj += 1000
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


@pytest.fixture
def train(plain_environment: Any, server: ServerProcess) -> Callable[[Order], Outcome]:  # noqa: F811 - the fixture
    """Train in this process, on a simulated GPU, through a real server."""
    from benchmarks.recurrences.training import trained  # imports both frameworks

    del plain_environment
    return lambda order: trained(order, server.url, NvmlMonitor(nvml=Counting()), Path())


@pytest.mark.parametrize("task", [task.name for task in tasks_for("gpu")])
def test_each_shrunken_task_of_the_gpu_trains(train: Callable[[Order], Outcome], task: str) -> None:
    run = train(Order(task=task, job_id=task, seed=5, batch_size=32, epochs=1, shrink=SHRINK))
    assert run.state == "max_epochs_reached", run.detail
    assert (run.epochs, run.energy_source, run.batch_size) == (1, "nvml", 32)
    assert run.energy_j > 0
    assert run.samples == tasks_for("gpu", [task], shrink=SHRINK)[0].samples
