"""Runs as jobs of a Ray cluster on this machine. Skipped without Ray, which is a large package."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.masters import (
    WAITS,
    assert_adopts_what_a_killed_master_left,
    assert_runs_are_jobs,
    launch_of,
    wait_for,
)
from tests.support.servers import free_port
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.executors import Launch

pytest.importorskip("ray.job_submission", reason="the extra ray is not installed")

from zeus_plugins.master.clusters import RayExecutor

pytestmark = pytest.mark.slow

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """URL of a cluster with one node."""
    dashboard = free_port()
    # Its sockets have long names in this folder.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--disable-usage-stats"]
        ports = [f"--port={free_port()}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        limits = [
            "--num-cpus=2",
            "--object-store-memory=100000000",
            f"--temp-dir={folder}",
            "--node-ip-address=127.0.0.1",
        ]
        log = Path(folder) / "ray.out"
        with log.open("wb") as output:
            process = subprocess.Popen([*map(str, command), *ports, *limits], stdout=output, stderr=output)
        try:
            yield up(f"http://127.0.0.1:{dashboard}", process, log)
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def up(address: str, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not takes_jobs(address):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    return address


def takes_jobs(address: str) -> bool:
    try:
        RayExecutor(address=address)
    except ZeusBSOConfigError:
        return False
    return True


def test_runs_become_ray_jobs(address: str, tmp_path: Path) -> None:
    executor = RayExecutor(address=address, runtime_env={"env_vars": {"OF_ALL": "yes"}}, entrypoint_num_cpus=1)
    assert_runs_are_jobs(executor, tmp_path)


def test_runtime_variables_and_variables_of_the_run_are_combined(address: str, tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "import os; print(os.environ['GO'], os.environ['OF_ALL'])")
    assert RayExecutor(address=address, runtime_env={"env_vars": {"OF_ALL": "yes"}}).run(launch, [].append) == 0
    assert launch.log.read_text() == f"{tmp_path / 'go'} yes\n"


def test_job_left_by_a_killed_master_is_awaited(address: str, tmp_path: Path) -> None:
    assert_adopts_what_a_killed_master_left(lambda: RayExecutor(address=address), tmp_path)
    launch = launch_of(tmp_path, WAITS)
    launch.marker.write_text("zeus-never-submitted")
    assert not RayExecutor(address=address).adopt(launch, [].append)


def test_externally_stopped_job_is_lost(address: str, tmp_path: Path) -> None:
    executor = RayExecutor(address=address)
    launch, shown, ended = launch_of(tmp_path, WAITS), list[str](), list[int]()
    waiting = threading.Thread(target=lambda: ended.append(executor.run(launch, shown.append)))
    waiting.start()
    wait_for(lambda: "waits\n" in shown)
    executor._client.stop_job(launch.marker.read_text())
    waiting.join()
    assert ended == [1]
    assert "STOPPED" in launch.log.read_text()


def test_interrupted_master_stops_the_job(address: str, tmp_path: Path) -> None:
    executor = RayExecutor(address=address)
    launch = launch_of(tmp_path, WAITS)
    asked, ids = executor._client.get_job_info, set[str]()

    def get_job_info(submission_id: str) -> object:
        ids.add(submission_id)
        if launch.log.exists():
            raise KeyboardInterrupt
        return asked(submission_id)

    executor._client.get_job_info = get_job_info
    with pytest.raises(KeyboardInterrupt):
        executor.run(launch, [].append)
    (submission_id,) = ids
    another = RayExecutor(address=address)._client
    wait_for(lambda: another.get_job_status(submission_id).is_terminal())
    assert another.get_job_status(submission_id) == "STOPPED"


def test_unusable_parameters_are_reported(address: str, tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "0")
    with pytest.raises(ZeusBSOConfigError, match=r"executor\.parameters.*nonesuch"):
        RayExecutor(address=address, nonesuch=1).run(launch, [].append)
    assert not launch.marker.exists()
    with pytest.raises(ZeusBSOConfigError, match=r"no Ray cluster takes jobs at http://127\.0\.0\.1:1"):
        RayExecutor(address="http://127.0.0.1:1")
    broken = Launch(["nonesuch"], None, {}, tmp_path / "rec01+try02.train.log")
    assert RayExecutor(address=address).run(broken, [].append) == 127
    assert "nonesuch" in broken.log.read_text()
