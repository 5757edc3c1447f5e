"""The cost of the callbacks in a training: an epoch with the callback beside the same epoch without it.

Two trainings, one with the callback, run in this process and take turns epoch by epoch, so that a machine whose speed
drifts is fair to both. Before each epoch without the callback a report is sent and timed, in the same rhythm as the
callback sends its own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Condition

from benchmarks.processes import Target
from benchmarks.trainings import (
    BATCH_SIZE,
    Duration,
    EpochClock,
    Stopwatch,
    Training,
    quiet,
    train_hugging_face,
    train_lightning,
)
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import GpuConfig, JobRegistration, JobSpec, TrainingResult

Train = Callable[[Training], None]

FRAMEWORKS: dict[str, Train] = {"Lightning": train_lightning, "Hugging Face": train_hugging_face}

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="benchmark")
MORE_EPOCHS_THAN_ANYBODY_TRAINS = 10**6


WITHOUT, WITH = 0, 1


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """The extent of the trainings.

    Attributes:
        epochs: Epochs of each training; its first one, in which all is new, and its last one do not count.
        steps: Steps of an epoch.
        limit_s: The trainings end after so many seconds, but not before their fourth epoch.
    """

    epochs: int
    steps: int
    limit_s: float


LEAST_EPOCHS = 4


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of an epoch with the callback, less a report, to the epochs without it just before and after.

    Attributes:
        median: Over all epochs with the callback.
        error: Standard error of this median, by the spread of the middle half of the ratios.
    """

    median: float
    error: float


@dataclass(frozen=True, slots=True)
class OverheadFigures:
    """The cost of one framework's callback.

    Attributes:
        epochs: Epochs with the callback that count.
        steps: Steps of an epoch.
        without_ms: An epoch without the callback; median.
        with_ms: An epoch with it; median.
        report_ms: A report, from the call of the client to its answer; median.
        wall: Ratio of the times that passed.
        cpu: Ratio of the times that the training's thread computed.
    """

    epochs: int
    steps: int
    without_ms: float
    with_ms: float
    report_ms: float
    wall: Ratio
    cpu: Ratio


def run_overhead(train: Train, server: Target, plan: OverheadPlan, *, prefix: str, directory: Path) -> OverheadFigures:
    """Measure one framework.

    Args:
        train: One of `FRAMEWORKS`.
        server: The server that the callback reports to.
        plan: How much.
        prefix: Starts the job ids; new for each call.
        directory: Where the trainings may write.

    Raises:
        ModuleNotFoundError: The framework is not installed.
        ZeusBSOError: The server did not do what was asked of it.
    """
    url = f"http://{server.host}:{server.port}"
    job = _job(f"{prefix}-training", target=plan.epochs, max_epochs=plan.epochs)
    with BsoClient(url) as client, quiet():
        # Imports the framework, which would count against the limit.
        train(Training(1, 1, EpochClock(lambda: True), None, url, directory))
        reporter = _Reporter(client, f"{prefix}-reports")
        turns, ends_at = _Turns(), time.monotonic() + plan.limit_s

        def run(side: int) -> list[Duration]:
            def between() -> bool:
                turns.pass_on(side)
                if side == WITHOUT:
                    reporter.report()
                return time.monotonic() < ends_at or len(clock.epochs) < LEAST_EPOCHS - 1

            clock = EpochClock(between)
            turns.await_turn(side)
            try:
                train(Training(plan.steps, plan.epochs, clock, job if side == WITH else None, url, directory))
            finally:
                turns.leave(side)
            return clock.epochs[1:]

        with ThreadPoolExecutor(2) as threads:
            without, with_callback = threads.map(run, (WITHOUT, WITH))
        for job_id in (f"{prefix}-training", f"{prefix}-reports"):
            client.delete_job(job_id)
    return figures_of(plan.steps, without, with_callback, reporter.reports[1:])


def figures_of(
    steps: int, without: Sequence[Duration], with_callback: Sequence[Duration], reports: Sequence[Duration]
) -> OverheadFigures:
    """The figures of epochs that took turns, the first of which was one without the callback.

    Args:
        steps: Of an epoch.
        without: Epochs without the callback, at least 2.
        with_callback: Epochs with it, each of which came after that of the same index in `without`.
        reports: Reports alone.
    """
    report = Duration(
        statistics.median(each.wall_s for each in reports), statistics.median(each.cpu_s for each in reports)
    )
    triples = [(before, epoch, after) for (before, after), epoch in zip(pairwise(without), with_callback, strict=False)]
    return OverheadFigures(
        epochs=len(triples),
        steps=steps,
        without_ms=1e3 * statistics.median(each.wall_s for each in without),
        with_ms=1e3 * statistics.median(each.wall_s for each in with_callback),
        report_ms=1e3 * report.wall_s,
        wall=_ratio([2 * (epoch.wall_s - report.wall_s) / (a.wall_s + b.wall_s) for a, epoch, b in triples]),
        cpu=_ratio([2 * (epoch.cpu_s - report.cpu_s) / (a.cpu_s + b.cpu_s) for a, epoch, b in triples]),
    )


def _ratio(ratios: Sequence[float]) -> Ratio:
    """Their median and, as of normally distributed ones, its standard error (infinite for a single one)."""
    if len(ratios) < 2:
        return Ratio(ratios[0], math.inf)
    first, _, third = statistics.quantiles(ratios, method="inclusive")
    deviation = (third - first) / 1.349
    return Ratio(statistics.median(ratios), math.sqrt(math.pi / 2) * deviation / math.sqrt(len(ratios)))


def _job(job_id: str, *, target: float, max_epochs: int) -> JobSpec:
    return JobSpec(
        job_id=job_id,
        job_id_prefix=job_id,
        batch_sizes=(BATCH_SIZE,),
        default_batch_size=BATCH_SIZE,
        target_metric=target,
        max_epochs=max_epochs,
        beta_knob=None,  # an early stop would end a training that this machine slowed down
    )


class _Turns:
    """Lets one of two threads run at a time."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._turn = WITHOUT
        self._left: set[int] = set()

    def await_turn(self, side: int) -> None:
        """Wait until it is this side's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == side or 1 - side in self._left)

    def pass_on(self, side: int) -> None:
        """Let the other side run until it passes on, too."""
        with self._changed:
            self._turn = 1 - side
            self._changed.notify_all()
        self.await_turn(side)

    def leave(self, side: int) -> None:
        """Leave all turns to the other side."""
        with self._changed:
            self._left.add(side)
            self._changed.notify_all()


class _Reporter:
    """Sends reports on a trial of its own, and times them."""

    def __init__(self, client: BsoClient, job_id: str) -> None:
        self.reports: list[Duration] = []
        self._client = client
        client.register(JobRegistration.of(_job(job_id, target=1.0, max_epochs=MORE_EPOCHS_THAN_ANYBODY_TRAINS), GPUS))
        self._trial = client.suggest(job_id)

    def report(self) -> None:
        """Send one report."""
        epoch = len(self.reports) + 1
        result = TrainingResult(
            job_id=self._trial.job_id,
            batch_size=self._trial.batch_size,
            trial_number=self._trial.trial_number,
            time=float(epoch),
            energy=300.0 * epoch,
            metric=0.0,
            current_epoch=epoch,
        )
        watch = Stopwatch()
        self._client.report(result)
        self.reports.append(watch.read())
