"""Patience of a master with the control plane of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.masters import launch_of
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master import clusters
from zeus_plugins.master.clusters import LOST, ClusterExecutor
from zeus_plugins.master.executors import Launch


class Cluster(ClusterExecutor):
    """Fail as often as scripted, and then lose the only job."""

    _CLUSTER = "the cluster"
    _AWAY = (OSError, RuntimeError)

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    def answer(self) -> str:
        if self.failures:
            raise self.failures.pop()
        return "job 7, STOPPED"

    def _submit(self, launch: Launch) -> Any: ...
    def _find_unfinished(self, launch: Launch) -> Any: ...
    def _cancel(self, job: Any) -> None: ...

    def _await_exit(self, job: Any, launch: Launch) -> str:  # noqa: ARG002 - the interface's signature
        return self._ask(self.answer)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "POLL_S", 0.0)


def test_late_answer_is_awaited_and_a_loss_is_logged_after_the_output_of_the_run(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "0")
    launch.log.write_text("half a line")
    assert Cluster(OSError("refused"), RuntimeError("502")).run(launch, [].append) == LOST
    assert launch.log.read_text() == "half a line\njob 7, STOPPED\n"


def test_unreachable_cluster_ends_the_master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clusters, "_PATIENCE_S", 0.0)
    failures = [OSError("refused")] * 1000
    with pytest.raises(ZeusBSOConfigError, match="the cluster has not answered for 0 s: refused"):
        Cluster(*failures).run(launch_of(tmp_path, "0"), [].append)


def test_unrelated_errors_are_not_treated_as_an_outage(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Cluster(ZeroDivisionError()).run(launch_of(tmp_path, "0"), [].append)
