"""A training step costs some microseconds: beyond the first steps, it only calls one hook, which has little to do."""

from __future__ import annotations

import gc
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import zeus_plugins
from tests.support.frameworks import FrameworkBench, Powered
from tests.support.job_bench import seconds_and_joules
from tests.support.power_limit_bench import TABLE
from zeus_plugins.power_limit import PowerLimitProfile, PowerLimitSample

TRANSPORT = "_transport.py"  # The network decides into how many pieces an answer is split.
PACKAGE = str(Path(zeus_plugins.__file__).parent)
# The first few steps of an epoch are counted, and the first thirty of a training are timed.
STEPS = (35, 38)
BATCH_SIZE = 4
OF_A_STEP = {"on_train_batch_end", "on_step_end", "_run_of", "batch_trained", "is_counting", "end_step"}


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the calls of each function of the package within the block, by this thread."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.endswith(TRANSPORT):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def batch_size(bench: FrameworkBench) -> Any:
    bench.job_id = f"digits-{uuid.uuid4().hex}"  # Each training has its own job.
    return bench.callback(bench.job(batch_sizes=(BATCH_SIZE,), default_batch_size=BATCH_SIZE))


def energy(bench: FrameworkBench) -> Any:
    return bench.Energy(seconds_and_joules(1.0, 10.0))


def power_limit(bench: FrameworkBench) -> Any:
    """Return a callback with no measurements left."""
    work = Powered()
    samples = [
        PowerLimitSample(limit_w=limit_w, steps=1, time_s=point.time_per_step_s, energy_j=point.average_power_w)
        for limit_w, point in TABLE.items()
    ]
    path = bench.folder / "profile.json"
    PowerLimitProfile(gpus=work.monitor.gpus(), batch_size=BATCH_SIZE, samples=tuple(samples)).save(path)
    return bench.PowerLimit(**work.options(profile_path=path, limits_w=tuple(TABLE)))


@pytest.mark.parametrize(
    "make",
    [batch_size, *(pytest.param(make, marks=pytest.mark.slow, id=make.__name__) for make in (energy, power_limit))],
)
def test_more_steps_add_calls_of_one_hook_only(bench: FrameworkBench, make: Callable[[FrameworkBench], Any]) -> None:
    calls = []
    for steps in STEPS:
        callback = make(bench)
        training = bench.training(callback, size=BATCH_SIZE, samples=steps * BATCH_SIZE)
        gc.collect()  # Otherwise a collection during the count might close generators of an earlier training.
        with counted_calls() as counted:
            training.train()
        assert training.steps == (steps, steps)
        assert getattr(callback, "chosen_limit_w", True) is not None
        calls.append(counted)
    assert calls[0]
    added = calls[1] - calls[0]
    assert {name.rpartition(".")[2] for name in added} <= OF_A_STEP
    assert set(added.values()) <= {STEPS[1] - STEPS[0]}
    assert calls[0] <= calls[1]
