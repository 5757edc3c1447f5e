"""Real trainings that end in every way restore the power limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.reporting import until
from zeus_plugins.power_limit.guard import recall

FOUND_W = 250.0
TRIED_W = 150.0


@pytest.fixture(name="limit")
def make_limit(tmp_path: Path) -> Path:
    path = tmp_path / "limit"
    path.write_text(str(FOUND_W))
    return path


def line_of(training: subprocess.Popen[str]) -> str:
    assert training.stdout is not None
    return training.stdout.readline().strip()


Begin = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(name="begin")
def make_begin(limit: Path) -> Iterator[Begin]:
    """Start trainings that have already changed the limit."""
    with ExitStack() as trainings:

        def begin(way: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tests.support.power_limit_training", str(limit), way]
            training = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            trainings.enter_context(training)
            trainings.callback(training.kill)
            assert line_of(training) == "changed"
            return training

        yield begin


def assert_put_back(limit: Path) -> None:
    """Assert that the limit is restored and its record removed, by the process beside a training after a moment."""
    until(lambda: float(limit.read_text()) == FOUND_W and recall("GPU-file") is None)


@pytest.mark.parametrize(
    ("way", "number", "status", "is_killed"),
    [
        ("closed", None, 0, False),
        pytest.param("forgotten", None, 0, False, marks=pytest.mark.slow),
        ("raised", None, 1, False),
        pytest.param("exit", None, 3, False, marks=pytest.mark.slow),
        ("signal", signal.SIGTERM, 128 + signal.SIGTERM, False),
        pytest.param("signal", signal.SIGINT, -signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param("hard exit", None, 3, True, marks=pytest.mark.slow),
        pytest.param("abort", None, -signal.SIGABRT, True, marks=pytest.mark.slow),
        ("signal", signal.SIGKILL, -signal.SIGKILL, True),
        pytest.param("signal", signal.SIGSEGV, -signal.SIGSEGV, True, marks=pytest.mark.slow),
        pytest.param("signal with a handler", signal.SIGTERM, 4, True, marks=pytest.mark.slow),
        pytest.param("signal, trained in a thread", signal.SIGTERM, -signal.SIGTERM, True, marks=pytest.mark.slow),
    ],
)
def test_ending_training_restores_the_limit_unless_killed(
    begin: Begin, limit: Path, way: str, number: signal.Signals | None, status: int, is_killed: bool
) -> None:
    training = begin(way)
    if way == "signal with a handler":
        assert line_of(training) == "handled"
    if number is not None:
        assert float(limit.read_text()) == TRIED_W
        training.send_signal(number)
    assert training.wait() == status
    assert is_killed or float(limit.read_text()) == FOUND_W
    assert_put_back(limit)


def test_cap_set_during_a_training_stays_when_the_training_is_killed(begin: Begin, limit: Path) -> None:
    training = begin("signal")
    limit.write_text("125")
    training.kill()
    training.wait()
    until(lambda: recall("GPU-file") is None)
    assert float(limit.read_text()) == 125


def test_surviving_children_of_a_killed_training_do_not_keep_the_limit(begin: Begin, limit: Path) -> None:
    training = begin("signal with a child")
    child = int(line_of(training))
    try:
        training.kill()
        training.wait()
        assert_put_back(limit)
        os.kill(child, 0)  # the child lives, and holds the training's files open
    finally:
        os.kill(child, signal.SIGKILL)


def test_training_continuing_after_the_profiler_has_no_helper_process(begin: Begin, limit: Path) -> None:
    training = begin("closed, and goes on")
    assert line_of(training) == "closed"
    assert float(limit.read_text()) == FOUND_W
    children = Path(f"/proc/{training.pid}/task/{training.pid}/children")
    if not children.exists():
        pytest.skip("this system does not list the children of a process")
    assert children.read_text().split() == []
