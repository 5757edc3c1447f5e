"""Runs as jobs of submitit, whose ``local`` cluster needs no Slurm. Skipped where submitit is not installed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.support.masters import REACHES, SIZES, Listed, master_of, python_job
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master import MasterState
from zeus_plugins.master.executors import Launch

pytest.importorskip("submitit", reason="the extra slurm is not installed")

from zeus_plugins.master.slurm import SubmititExecutor


def executor() -> SubmititExecutor:
    return SubmititExecutor(cluster="local", timeout_min=2)


def test_runs_are_jobs(tmp_path: Path) -> None:
    job = python_job("import sys\nprint('size', sys.argv[1])\nif sys.argv[1] == '32': sys.exit(3)\n" + REACHES)
    master = master_of(tmp_path, Listed(64, 32, 128), executor=executor())
    master.run(job, 2, SIZES, None, 0.5, logdir=tmp_path / "here")
    history = MasterState.read(tmp_path / "here").history
    assert [(run.job_id, run.bs, run.outcome) for run in history] == [
        ("rec01+try01", 64, "completed"),
        ("rec02+try01", 32, "failed"),
        ("rec02+try02", 128, "completed"),
    ]
    assert history[1].reason == "exit status 3; its last words: size 32"
    assert (tmp_path / "here" / "rec02+try02.train.log").read_text() == "size 128\n"
    assert list((tmp_path / "here" / "submitit").glob("*_result.pkl"))


def launch_of(tmp_path: Path, program: str) -> Launch:
    command = python_job(program).command_line(64, 0.5, 1)
    return Launch(command, None, {"GO": str(tmp_path / "go")}, tmp_path / "rec01+try01.train.log")


WAITS = "import os, time\nprint('waits')\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.05)\nprint('ends')"


def test_a_job_that_a_killed_master_left_is_waited_for(tmp_path: Path) -> None:
    launch, shown = launch_of(tmp_path, WAITS), []
    killed = threading.Thread(target=executor().run, args=(launch, shown.append))
    killed.start()
    while "waits\n" not in shown:
        time.sleep(0.05)
    threading.Timer(0.5, (tmp_path / "go").touch).start()
    seen: list[str] = []
    assert executor().adopt(launch, seen.append)
    assert "".join(seen) == "waits\nends\n"
    killed.join()
    assert not executor().adopt(launch, seen.append)


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    launch = Launch(["nonesuch"], None, {}, tmp_path / "rec01+try01.train.log")
    assert executor().run(launch, [].append) == 127
    assert "nonesuch cannot be started" in launch.log.read_text()


def test_a_parameter_that_there_is_not_is_told(tmp_path: Path) -> None:
    with pytest.raises(ZeusBSOConfigError, match="submitit cannot make Slurm jobs of these parameters"):
        SubmititExecutor(cluster="local", nonesuch=1).run(launch_of(tmp_path, "0"), [].append)
