"""Trainings as jobs of Slurm: the batch script that relaunches a training, scrontab, and the master's executor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.masters import ROOT, assert_runs_are_jobs, launch_of
from tests.support.servers import ServerProcess
from tests.support.slurm import LIMIT_S, cluster, require_slurm

pytestmark = pytest.mark.slow

DEPLOY = ROOT / "deploy" / "slurm"

TRAINING = """
import os, sys, time
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.protocol import GpuConfig

job_id, reached_at, waits = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
job = JobSpec(job_id=job_id, job_id_prefix=job_id, batch_sizes=(8, 16), default_batch_size=8, target_metric=0.5,
              max_epochs=1)
gpus = GpuConfig(max_power=300, number_of_gpus=1, gpu_model="-")
monitor = ReplayMonitor([Measurement(1.0, 50.0, "nvml")] * 10, gpus)
with BatchSizeOptimizer(monitor, None, job) as optimizer:
    optimizer.get_batch_size()
    optimizer.on_train_begin()
    print("trains", flush=True)
    while waits:
        time.sleep(0.1)
    launch = int(os.environ.get("SLURM_RESTART_COUNT", 0)) + 1
    optimizer.on_evaluate(0.9 if launch >= reached_at else 0.1)
"""


@pytest.fixture(scope="module")
def configuration() -> Iterator[Path]:
    require_slurm()
    with cluster() as configuration:
        yield configuration


@pytest.fixture(autouse=True)
def _cluster(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def slurm(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def submitted(server: ServerProcess, folder: Path, *arguments: str, **environ: str) -> str:
    """Submit a job with the training above; return its number."""
    (folder / "training.py").write_text(TRAINING)
    exported = ",".join(
        ["ALL", f"ZEUS_SERVER_URL={server.url}", *(f"{name}={value}" for name, value in environ.items())]
    )
    # Each job needs a unique name, because jobs with equal names wait for each other.
    options = [
        "--parsable",
        f"--job-name={folder.name}",
        f"--output={folder / 'log'}",
        f"--export={exported}",
        "--time=5",
    ]
    script = [DEPLOY / "recurring.sbatch", sys.executable, folder / "training.py", *arguments]
    return slurm("sbatch", *options, *script).strip()


hastened: set[tuple[str, str]] = set()
"""The launches, by job and number, that were told to begin sooner."""


def field(number: str, name: str) -> str:
    (found,) = re.findall(rf"\b{name}=(\S+)", slurm("scontrol", "show", "job", number))
    return str(found)


def wait_for(folder: Path, condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, (folder / "log").read_text() if (folder / "log").exists() else "no log"
        time.sleep(0.1)


def is_over(number: str) -> bool:
    launch = (number, field(number, "Restarts"))
    if (field(number, "JobState"), field(number, "Reason")) == ("PENDING", "BeginTime") and launch not in hastened:
        # Slurm delays a requeued job by two minutes, and a launch fails during the cleanup of the previous launch. A
        # job that has already started is left unchanged.
        with suppress(subprocess.CalledProcessError):
            slurm("scontrol", "update", f"JobId={number}", "StartTime=now+5")
        hastened.add(launch)
    return field(number, "JobState") in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


def states(server: ServerProcess, job_id: str) -> list[str]:
    return [each["state"] for each in httpx.get(f"{server.url}/api/jobs/{job_id}").json()["trials"]]


def test_training_missing_the_target_is_launched_again(shared_server: ServerProcess, tmp_path: Path) -> None:
    number = submitted(shared_server, tmp_path, "slurm-again", "2")
    wait_for(tmp_path, lambda: is_over(number))
    assert field(number, "JobState") == "COMPLETED"
    assert field(number, "Restarts") == "1"
    assert states(shared_server, "slurm-again") == ["exhausted", "completed"]
    log = (tmp_path / "log").read_text()
    # Slurm ends the first launch when it requeues the job.
    assert re.findall(r"launch (\d) of job \d+ ended with exit status (\d+)", log) == [("1", "75"), ("2", "0")]


def test_relaunches_stop_at_the_limit(shared_server: ServerProcess, tmp_path: Path) -> None:
    number = submitted(shared_server, tmp_path, "slurm-never", "9", MOST_LAUNCHES="1")
    wait_for(tmp_path, lambda: is_over(number))
    assert (field(number, "JobState"), field(number, "ExitCode")) == ("FAILED", "75:0")
    assert states(shared_server, "slurm-never") == ["exhausted"]


def test_training_terminated_by_slurm_suspends_the_trial(shared_server: ServerProcess, tmp_path: Path) -> None:
    number = submitted(shared_server, tmp_path, "slurm-ended", "1", "waits")
    wait_for(tmp_path, lambda: (tmp_path / "log").exists() and "trains" in (tmp_path / "log").read_text())
    # Slurm sends this signal 60 s before the end of a job's time.
    slurm("scancel", "--batch", "--signal=TERM", number)
    wait_for(tmp_path, lambda: is_over(number))
    assert field(number, "ExitCode") == "143:0"
    assert states(shared_server, "slurm-ended") == ["suspended"]


@pytest.mark.skipif(shutil.which("scrontab") is None, reason="needs scrontab, which Debian's Slurm comes without")
def test_scrontab_takes_the_line_for_each_night() -> None:
    slurm("scrontab", DEPLOY / "recurring.scrontab")
    try:
        (line,) = slurm("squeue", "--noheader", "--name=recurring-submit", "--format=%T %S").splitlines()
        assert re.fullmatch(r"PENDING \d{4}-\d\d-\d\dT02:00:\d\d", line)
    finally:
        slurm("scrontab", "-r")


def test_line_of_scrontab_runs_a_job(
    tmp_path: Path, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: scrontab itself runs it at full minutes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ZEUS_SERVER_URL", shared_server.url)
    shutil.copy(DEPLOY / "recurring.sbatch", tmp_path)
    (tmp_path / "train.py").write_text("import sys; sys.argv[1:] = ['slurm-line', '1']\n" + TRAINING)
    (line,) = [line for line in (DEPLOY / "recurring.scrontab").read_text().splitlines() if not line.startswith("#")]
    command = line.split(maxsplit=5)[5]
    said = slurm("sh", "-c", command.replace("sbatch ", f"sbatch --output={tmp_path / 'log'} "))
    number = said.split()[-1]
    wait_for(tmp_path, lambda: is_over(number))
    assert states(shared_server, "slurm-line") == ["completed"]


def test_runs_of_a_master_are_slurm_jobs(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    from zeus_plugins.master.clusters import SubmititExecutor

    executor = SubmititExecutor(timeout_min=5, slurm_additional_parameters={"gpus_per_node": 1})
    assert_runs_are_jobs(executor, tmp_path)
    launch = launch_of(tmp_path, "import os; print('job', os.environ['SLURM_JOB_ID'])")
    assert executor.run(launch, [].append) == 0
    assert re.fullmatch(r"job \d+\n", launch.log.read_text())
