"""A measurement of one hour on a GPU, in calls of a few minutes: ``python -m benchmarks.recurrences hour``.

Each call resumes where the last one ended or was killed: it checks the GPU, calibrates the targets, measures the steps
of `hour_steps`, and writes the results so far. It also packs the state into one archive.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import BenchmarkError
from benchmarks.recurrences.calibration import Target, calibrated, next_step, target
from benchmarks.recurrences.harness import (
    BROKEN,
    DATABASE,
    RECORDS,
    State,
    Trainings,
    is_done,
    served,
    withdraw_unfinished,
    write_whole,
)
from benchmarks.recurrences.plan import Extent, Step, steps
from benchmarks.recurrences.tasks import GPU, HOUR_CONTENDERS, HOUR_TASKS, Task, tasks_for
from benchmarks.reports import Record
from zeus_plugins.client.http import BsoClient

LEFT_STATUS = 3
"""Exit status if steps are left: run the same command again."""

GPU_CHECK = "gpu-check.json"
LOG = "hour.log"
MACHINE = "machine.json"
TARGETS = "targets.json"

RESERVE_S = 40.0
"""Seconds reserved at the end of a call to stop the server, write the results and pack the state."""

EXIT_S = 3.0
"""Seconds before the end of a call at which a watchdog ends the process."""

LEAST_S = 30.0
"""Seconds, besides `RESERVE_S`, that must be left for a call to start its server."""

START_S = 6.0
"""Expected seconds from the start of a process to the start of its training."""

PACK_S = 20.0
"""Minimum seconds between two packings of the state, which changes only when a training ends."""

RECURRENCES = 12
REPEATS = 3

_CHECK_LIMIT_S = 240.0
_PACKED = (RECORDS, GPU_CHECK, MACHINE, TARGETS, LOG)
_SEEN_BROKEN = 3


@dataclass(frozen=True, slots=True)
class Hour:
    """One call of the measurement, with the state that it continues.

    Attributes:
        state: Records so far, and their directory.
        end_s: Time on the monotonic clock at which the call must end.
        seconds: Least and most seconds that the default size should need to reach the target.
        shrink: See `Task`.
        pack_to: File into which the state is packed.
        recurrences: Recurrences of each job.
        repeats: Runs of each size.
        tasks: Names of the tasks.
    """

    state: State
    end_s: float
    seconds: tuple[float, float]
    shrink: int
    pack_to: Path
    recurrences: int = RECURRENCES
    repeats: int = REPEATS
    tasks: tuple[str, ...] = HOUR_TASKS

    def say(self, what: str) -> None:
        """Print a line with the time, and append it to the log."""
        line = f"{datetime.now(UTC):%H:%M:%S} {what}"
        print(line, file=sys.stderr, flush=True)
        with (self.state.directory / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def exit_in_time(self) -> None:
        """Start a watchdog that exits this process `EXIT_S` before the call's end; its child processes then exit."""
        watchdog = threading.Timer(self.end_s - EXIT_S - time.monotonic(), os._exit, [LEFT_STATUS])
        watchdog.daemon = True
        watchdog.start()

    def measure(self) -> int:
        """Check the GPU, calibrate and measure until the call must end; return the number of steps that are left.

        Raises:
            BenchmarkError: The server did not start, or each of the first trainings ended with an error.
        """
        self._check_gpu()
        packed_s = time.monotonic()
        end_s, is_first = self.end_s - RESERVE_S, True
        if end_s - time.monotonic() < LEAST_S:
            return len(self.left())
        with served(self.state.directory) as url:
            with BsoClient(url) as client:
                withdraw_unfinished(client)
            trainings = Trainings(self.state, url, end_s=end_s, keeps_broken=True)
            while left := self.left():
                step = left[0]
                if not is_first and time.monotonic() + expected_s(step, self.state.records) > end_s:
                    self.say(f"{step.key} would not end in time")
                    break
                try:
                    trainings.attempt(step)
                except TimeoutError:
                    self.say(f"{step.key} was ended with the call")
                    break
                is_first = False
                self.say(f"{len(left)} left; {_told(self.state.records[-1])}")
                self._require_unbroken()
                if time.monotonic() - packed_s >= PACK_S:
                    pack(self.state.directory, self.pack_to)
                    packed_s = time.monotonic()
        return len(self.left())

    def left(self) -> list[Step]:
        """Return the steps that are not done.

        Until every task has a target, these steps are the next calibration training of each task without a target.
        """
        calibrating = [
            step
            for task in self._tasks()
            if (step := next_step(task, self._calibrations(task), self.seconds)) is not None
        ]
        if calibrating:
            return calibrating
        if not (self.state.directory / TARGETS).exists():
            self._write_targets()
        tasks = [calibrated(task, found) for task, found in zip(self._tasks(), self.targets().values(), strict=True)]
        planned = hour_steps(tasks, self.recurrences, self.repeats)
        return [step for step in planned if not is_done(step, self.state.of(step.key))]

    def targets(self) -> dict[str, Target]:
        """Return the target of each calibrated task."""
        file = self.state.directory / TARGETS
        return {name: Target(**found) for name, found in json.loads(file.read_text("utf-8")).items()}

    def _write_targets(self) -> None:
        found = {task.name: target(task, self._calibrations(task), self.seconds) for task in self._tasks()}
        write_whole(self.state.directory / TARGETS, json.dumps({name: asdict(each) for name, each in found.items()}))
        for name, each in found.items():
            reached = ", ".join(f"{size} after {at_s:.1f} s" for size, at_s in sorted(each.reached_s.items()))
            problem = f" BUT {each.problem}" if each.problem else ""
            self.say(
                f"target of {name}: {each.metric:g} within {each.max_epochs} epochs; "
                f"reached by {reached or 'no size'}{problem}"
            )

    def _tasks(self) -> list[Task]:
        return tasks_for(GPU, self.tasks, shrink=self.shrink)

    def _calibrations(self, task: Task) -> list[Record]:
        return [each for each in self.state.records if (each["stage"], each["task"]) == ("calibrate", task.name)]

    def _check_gpu(self) -> None:
        """Run `benchmarks.gpu_check` once, before anything uses the GPU."""
        file = self.state.directory / GPU_CHECK
        if file.exists():
            return
        self.say("checks the GPU")
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--json"]
        limit_s = min(_CHECK_LIMIT_S, self.end_s - RESERVE_S - time.monotonic())
        try:
            done = subprocess.run(  # noqa: S603 - this interpreter, on our own module
                command, capture_output=True, text=True, timeout=limit_s, check=False
            )
            found: dict[str, Any] = json.loads(done.stdout) if done.stdout else _broken_check(done.stderr[-1000:])
        except subprocess.TimeoutExpired as error:
            if limit_s < _CHECK_LIMIT_S:
                self.say("the check of the GPU was ended with the call")
                return
            found = _broken_check(str(error))
        except ValueError as error:
            found = _broken_check(str(error))
        write_whole(file, json.dumps(found))
        for each in found["results"]:
            self.say(f"gpu-check: {each['verdict']}: {each['check']}: {each['found']}")
        pack(self.state.directory, self.pack_to)

    def _require_unbroken(self) -> None:
        records = self.state.records
        if len(records) >= _SEEN_BROKEN and all(each["state"] == BROKEN for each in records):
            raise BenchmarkError(f"the first {len(records)} trainings broke: {records[-1]['detail']}")


def hour_steps(tasks: Sequence[Task], recurrences: int = RECURRENCES, repeats: int = REPEATS) -> list[Step]:
    """Return the steps after the calibration, ordered so that the results are useful even if the hour ends early.

    Each task has a job of `recurrences` recurrences. After every fourth recurrence follow a run of each size and a
    pair of trainings with and without the callback, up to `repeats` times. A second job of each task comes last, with
    recurrences only.
    """
    first = Extent(seeds=1, recurrences=recurrences, repeats=repeats, pairs=repeats, contenders=HOUR_CONTENDERS)
    second = replace(first, first_seed=1, repeats=0, pairs=0)
    planned = [*steps(tasks, first), *steps(tasks, second)]
    return sorted(planned, key=lambda step: (step.seed, _place(step)))


def _broken_check(problem: str) -> dict[str, Any]:
    return {"results": [], "problem": problem}


def expected_s(step: Step, records: Sequence[Record]) -> float:
    """Return the expected seconds of a step's training, from the task's earlier trainings; 0 without any.

    The longest training with the same stage and `who` decides; if no training matches, the median of the task does.
    `START_S` is added because the measured seconds do not contain the start of the process.
    """
    of_task = [each for each in records if each["task"] == step.task and "fit_wall_s" in each]
    of_kind = [each["fit_wall_s"] for each in of_task if (each["stage"], each["who"]) == (step.stage, step.who)]
    if not of_task:
        return 0.0
    usual_s: float = median(each["fit_wall_s"] for each in of_task)
    return START_S + max(of_kind, default=usual_s)


def pack(directory: Path, file: Path) -> None:
    """Pack the files that a later call needs into one archive, replacing `file` atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    # If a crash leaves a trial in the database without its record, the next call runs the training again.
    with tempfile.TemporaryDirectory() as folder, tarfile.open(part, "w:gz", compresslevel=3) as archive:
        for name in _PACKED:
            if (directory / name).exists():
                archive.add(directory / name, name)
        if (directory / DATABASE).exists():
            copy = Path(folder) / DATABASE
            _back_up(directory / DATABASE, copy)
            archive.add(copy, DATABASE)
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(file)


def _back_up(database: Path, copy: Path) -> None:
    source, destination = sqlite3.connect(database), sqlite3.connect(copy)
    try:
        source.backup(destination)
    finally:
        source.close()
        destination.close()


def _place(step: Step) -> float:
    """Return the position of a step among the steps of its seed, counted in recurrences."""
    if step.stage == "recurrence":
        return step.number
    return 4 * step.number + (3.3 if step.stage == "size" else 3.6)


def _told(record: Record) -> str:
    curve = record.get("curve") or []
    metric = f", {len(curve)} epochs to {curve[-1][2]:.3g}" if curve else ""
    return (
        f"{record['key']}: size {record['batch_size']}, {record['state']}{metric}, {record['time_s']:.1f} s, "
        f"{record['energy_j']:.0f} J, process {record['process_s']:.1f} s, load {record['load_1']:.1f}"
    )
