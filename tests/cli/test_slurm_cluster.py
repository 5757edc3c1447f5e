"""Trainings as jobs of Slurm: the batch script that relaunches a training, scrontab, and the runs of a master."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.masters import REACHES, ROOT, SIZES, WAITS, adopted, master_of, python_job
from tests.support.masters import wait_for as wait_for_it
from tests.support.servers import ServerProcess, free_port
from zeus_plugins.master.executors import Launch, LocalExecutor

# --- A cluster with one node, this machine, from Debian's slurm-wlm and munge -----------------------------------------


DAEMONS = ("munged", "slurmctld", "slurmd")
LIMIT_S = 240.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
ScronParameters=enable
SchedulerParameters=requeue_delay=0,sched_interval=1
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES
"""


def require_slurm() -> None:
    """Skip the test if such a cluster is impossible here."""
    absent = [daemon for daemon in DAEMONS if shutil.which(daemon) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)} (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as root alone")


@contextmanager
def cluster() -> Iterator[Path]:
    """Yield the SLURM_CONF of a cluster with one imaginary GPU."""
    with ExitStack() as until_the_end:
        # munged refuses sockets with long names.
        folder = Path(
            until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True))
        )
        (folder / "spool").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        configuration = folder / "slurm.conf"
        ports = {"controller_port": free_port(), "node_port": free_port()}
        host = socket.gethostname().partition(".")[0]
        configuration.write_text(CONFIGURATION.format(host=host, folder=folder, **ports))
        names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "pid", "seed-file": "seed"}
        munged = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in names.items())]
        environ = {**os.environ, "SLURM_CONF": str(configuration)}
        # In the foreground, so that the daemons end with this block.
        for command in ([*munged, f"--log-file={folder / 'munged.log'}"], ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            until_the_end.enter_context(_daemon(command, environ, folder / f"{command[0]}.out"))
            if command[0] == "munged":
                _wait_for(lambda: (folder / "munge.sock").exists(), folder)
        _wait_for(lambda: b"idle" in _asked(environ, "sinfo"), folder)
        try:
            yield configuration
        finally:
            # Processes that run jobs outlive the daemons and wait for them.
            _asked(environ, "scancel", f"--nodelist={host}")
            _wait_for(lambda: not _asked(environ, "squeue"), folder)


def _asked(environ: dict[str, str], program: str, *arguments: str) -> bytes:
    command = [program, *(arguments or ["--noheader"])]
    return subprocess.run(command, env=environ, capture_output=True, check=False).stdout


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text() for log in folder.glob("*.out"))
            raise AssertionError(f"Slurm did not start, or end: {logs}")
        time.sleep(0.1)


@contextmanager
def _daemon(command: list[str], environ: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output, subprocess.Popen(command, env=environ, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


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
    job = python_job("import os; print('job', os.environ['SLURM_JOB_ID'])\n" + REACHES)
    job = replace(job, command=["srun", "--gpus-per-node=1", *job.command])
    runs = master_of(tmp_path).run(job, 2, SIZES, None, 0.5, logdir=tmp_path)
    assert [run.outcome for run in runs] == ["completed"] * 2
    logs = [(tmp_path / f"rec0{recurrence}+try01.train.log").read_text() for recurrence in (1, 2)]
    assert all(re.fullmatch(r"job \d+\n", log) for log in logs)
    assert logs[0] != logs[1]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    command = ["srun", *python_job(WAITS).command_line(64, 0.5, 1)]
    return Launch(command, None, {"GO": str(tmp_path / "go")}, tmp_path / "rec01+try01.train.log")


def test_slurm_job_of_a_killed_master_is_awaited(launch: Launch) -> None:
    shown: list[str] = []
    killed = threading.Thread(target=LocalExecutor().run, args=(launch, shown.append))
    killed.start()
    wait_for_it(lambda: "waits\n" in shown)
    assert adopted(LocalExecutor(), launch) == "waits\nends\n"
    killed.join()


def test_interrupted_master_ends_its_slurm_job(launch: Launch) -> None:
    with pytest.raises(KeyboardInterrupt):
        LocalExecutor().run(launch, lambda _: os.kill(os.getpid(), signal.SIGINT))
    wait_for_it(lambda: not slurm("squeue", "--noheader"))
