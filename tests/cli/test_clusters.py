"""Patience of a master with the control plane of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master import clusters
from zeus_plugins.master.clusters import LOST, answered, note_loss


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "POLL_S", 0.0)


def test_an_answer_may_come_late() -> None:
    failures = [OSError("refused"), RuntimeError("502")]

    def asks() -> str:
        if failures:
            raise failures.pop()
        return "an answer"

    assert answered(asks, "the cluster", (OSError, RuntimeError)) == "an answer"


def test_a_cluster_that_is_gone_ends_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_PATIENCE_S", 0.0)

    def asks() -> str:
        raise OSError("refused")

    with pytest.raises(ZeusBSOConfigError, match="the cluster has not answered for 0 s: refused"):
        answered(asks, "the cluster", (OSError,))


def test_other_errors_are_nobodys_absence() -> None:
    with pytest.raises(ZeroDivisionError):
        answered(lambda: 1 // 0, "the cluster", (OSError,))


def test_a_loss_is_noted_behind_what_the_run_has_printed(tmp_path: Path) -> None:
    log = tmp_path / "rec01+try01.train.log"
    log.write_text("half a line")
    assert note_loss(log, "job 7, STOPPED") == LOST
    assert log.read_text() == "half a line\njob 7, STOPPED\n"
