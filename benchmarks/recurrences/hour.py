"""A measurement of one hour on a GPU, in calls of a few minutes: ``python -m benchmarks.recurrences hour``.

Each call resumes where the last one ended or was killed: it checks the GPU, then calibrates the target of each task and
measures the task, and writes the results so far. It also packs the state into one archive.
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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import BenchmarkError
from benchmarks.recurrences.calibration import (
    Target,
    calibrated,
    calibration_steps,
    drift_problem,
    load_problem,
    target,
)
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
from benchmarks.recurrences.plan import Extent, Stage, Step, steps
from benchmarks.recurrences.tasks import DEFAULT, GPU, HOUR_CONTENDERS, HOUR_TASKS, Task, tasks_for
from benchmarks.reports import Record
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import auto

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

HOUR = Extent(seeds=1, recurrences=10, repeats=1, pairs=0, contenders=HOUR_CONTENDERS)
"""The extent of a task: a job of ten recurrences by each contender, and a run of each size."""

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
        extent: Extent of each task.
        tasks: Names of the tasks.
    """

    state: State
    end_s: float
    seconds: tuple[float, float]
    shrink: int
    pack_to: Path
    extent: Extent = HOUR
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
            BenchmarkError: The server did not start, each of the first trainings ended with an error, or see `left`.
        """
        self._check_gpu()
        packed_s = time.monotonic()
        end_s, is_first = self.end_s - RESERVE_S, True
        if end_s - time.monotonic() < LEAST_S:
            return len(self.left())
        with served(self.state.directory) as url:
            with BsoClient(url) as client:
                withdraw_unfinished(client)
            trainings = Trainings(self.state, url, end_s=end_s, keeps_broken=True, monitor=auto())
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
        """Return the steps that are not done, task by task; of a task without a target, only its calibration.

        Raises:
            BenchmarkError: A task draws too little power, or its target does not fit any more.
        """
        return [step for task in self._tasks() for step in self._left(task) if not self._is_done(step)]

    def _left(self, task: Task) -> list[Step]:
        warm_up, *calibrating = calibration_steps(task, self.seconds[1])
        found = self.targets().get(task.name)
        if self.shrink == 1:
            self._require_fit(task, found)
        if found is None and not all(map(self._is_done, [warm_up, *calibrating])):
            return [warm_up, *calibrating]
        if not self._is_done(warm_up):
            return [warm_up]
        return list(steps([calibrated(task, found or self._calibrated(task))], self.extent))

    def _require_fit(self, task: Task, found: Target | None) -> None:
        """Raise `BenchmarkError` if the default draws too little power, or its first runs do not fit the target."""
        problem = next(filter(None, (load_problem(task, each) for each in self._records("warm-up", task))), "")
        if found is not None:
            recurrences = [each for each in self._records("recurrence", task) if each["who"] == DEFAULT]
            problem = problem or drift_problem(calibrated(task, found), recurrences, self.seconds)
        if problem:
            raise BenchmarkError(problem)

    def targets(self) -> dict[str, Target]:
        """Return the target of each calibrated task."""
        file = self.state.directory / TARGETS
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return {name: Target(**each) for name, each in found.items()}

    def take_targets(self, file: Path) -> None:
        """Take the targets of an earlier measurement, for tasks that have no target yet."""
        self._write_targets({name: Target(**each) for name, each in json.loads(file.read_text("utf-8")).items()})

    def _write_targets(self, found: dict[str, Target]) -> None:
        known = {name: asdict(each) for name, each in (found | self.targets()).items()}
        write_whole(self.state.directory / TARGETS, json.dumps(known))

    def _calibrated(self, task: Task) -> Target:
        found = target(task, self._records("calibrate", task), self.seconds)
        self._write_targets({task.name: found})
        reached = ", ".join(f"{size} after {at_s:.1f} s" for size, at_s in sorted(found.reached_s.items()))
        self.say(
            f"target of {task.name}: {found.metric:g} within {found.max_epochs} epochs; "
            f"reached by {reached or 'no size'}{f' BUT {found.problem}' if found.problem else ''}"
        )
        return found

    def _tasks(self) -> list[Task]:
        return tasks_for(GPU, self.tasks, shrink=self.shrink)

    def _records(self, stage: Stage, task: Task) -> list[Record]:
        return [each for each in self.state.records if (each["stage"], each["task"]) == (stage, task.name)]

    def _is_done(self, step: Step) -> bool:
        return is_done(step, self.state.of(step.key))

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


def _told(record: Record) -> str:
    curve = record.get("curve") or []
    metric = f", {len(curve)} evaluations to {curve[-1][2]:.3g}" if curve else ""
    return (
        f"{record['key']}: size {record['batch_size']}, {record['state']}{metric}, {record['time_s']:.1f} s, "
        f"{record['energy_j']:.0f} J, process {record['process_s']:.1f} s, load {record['load_1']:.1f}"
    )
