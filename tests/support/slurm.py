"""A Slurm cluster with one node, this machine, from Debian's slurm-wlm and munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.servers import free_port

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
