"""Real trainings that end in all ways: the power limit is then what it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from zeus_plugins.power_limit.guard import recall

FOUND_W = 250.0
TRIED_W = 150.0
LIMIT_S = 60.0


@pytest.fixture(name="limit")
def make_limit(tmp_path: Path) -> Path:
    path = tmp_path / "limit"
    path.write_text(str(FOUND_W))
    return path


class Training:
    """A training that has changed the limit already."""

    def __init__(self, limit: Path, way: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.power_limit_training", str(limit), way],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "changed", self.process.communicate()[1]

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


Begin = Callable[[str], Training]


@pytest.fixture(name="begin")
def make_begin(limit: Path) -> Iterator[Begin]:
    trainings: list[Training] = []

    def begin(way: str) -> Training:
        trainings.append(Training(limit, way))
        return trainings[-1]

    yield begin
    for training in trainings:
        training.process.kill()
        training.process.communicate()


def assert_put_back(limit: Path) -> None:
    """The limit is what was found, and no record of it is left; the process beside a training needs a moment."""
    deadline = time.monotonic() + LIMIT_S
    while (float(limit.read_text()) != FOUND_W or recall("GPU-file")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert float(limit.read_text()) == FOUND_W
    assert recall("GPU-file") is None


@pytest.mark.parametrize(
    ("way", "number", "status"),
    [
        ("closed", None, 0),
        ("forgotten", None, 0),
        ("raised", None, 1),
        ("exit", None, 3),
        ("signal", signal.SIGTERM, 128 + signal.SIGTERM),
        ("signal", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_training_that_ends_by_itself_or_is_asked_to_puts_the_limit_back(
    begin: Begin, limit: Path, way: str, number: signal.Signals | None, status: int
) -> None:
    training = begin(way)
    if number is not None:
        assert float(limit.read_text()) == TRIED_W
        training.process.send_signal(number)
    assert training.process.wait() == status
    assert float(limit.read_text()) == FOUND_W


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("hard exit", None),
        ("abort", None),
        ("signal", signal.SIGKILL),
        ("signal", signal.SIGSEGV),
        ("signal with a handler", signal.SIGTERM),
        ("signal, trained in a thread", signal.SIGTERM),
    ],
)
def test_the_limit_of_a_training_that_is_killed_is_put_back(
    begin: Begin, limit: Path, way: str, number: signal.Signals | None
) -> None:
    training = begin(way)
    if way == "signal with a handler":
        assert training.read() == "handled"
    if number is not None:
        assert float(limit.read_text()) == TRIED_W
        training.process.send_signal(number)
    assert training.process.wait() != 0
    assert_put_back(limit)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system tells of a process's end by the pipe alone")
def test_children_that_outlive_a_killed_training_do_not_keep_its_limit(begin: Begin, limit: Path) -> None:
    training = begin("signal with a child")
    child = int(training.read())
    try:
        training.process.kill()
        training.process.wait()
        assert_put_back(limit)
        os.kill(child, 0)  # it lives, and holds the pipe open
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_training_that_goes_on_after_its_profiler_has_nothing_beside_it(begin: Begin, limit: Path) -> None:
    training = begin("closed, and goes on")
    assert training.read() == "closed"
    assert float(limit.read_text()) == FOUND_W
    children = Path(f"/proc/{training.process.pid}/task/{training.process.pid}/children")
    if not children.exists():
        pytest.skip("this system does not list the children of a process")
    assert children.read_text().split() == []
