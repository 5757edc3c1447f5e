"""Runs as jobs of submitit, with the ``local`` cluster, which needs no Slurm. Skipped without submitit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.masters import assert_adopts_what_a_killed_master_left, assert_runs_are_jobs, launch_of
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.executors import Launch

pytest.importorskip("submitit", reason="the extra slurm is not installed")

from zeus_plugins.master.clusters import SubmititExecutor


def executor() -> SubmititExecutor:
    return SubmititExecutor(cluster="local", timeout_min=2)


@pytest.mark.slow
def test_runs_become_slurm_jobs(tmp_path: Path) -> None:
    folder = assert_runs_are_jobs(executor(), tmp_path)
    assert list((folder / "submitit").glob("*_result.pkl"))


@pytest.mark.slow
def test_job_left_by_a_killed_master_is_awaited(tmp_path: Path) -> None:
    assert_adopts_what_a_killed_master_left(executor, tmp_path)


def test_missing_command_is_reported(tmp_path: Path) -> None:
    launch = Launch(["nonesuch"], None, {}, tmp_path / "rec01+try01.train.log")
    assert executor().run(launch, [].append) == 127
    assert "nonesuch" in launch.log.read_text()


def test_unknown_parameter_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ZeusBSOConfigError, match="submitit cannot make Slurm jobs of these parameters"):
        SubmititExecutor(cluster="local", nonesuch=1).run(launch_of(tmp_path, "0"), [].append)
