"""Recorded trainings as workloads: traces as published with the Zeus paper (NSDI '23), and a job's own trials.

Traces are two tables. The train trace has a row per training run and target metric, with the epoch at which the run
reached the target (``target_epoch``; empty or ``nan``: never). The power trace has a row per batch size and power
limit, with seconds per epoch and average watts.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bso_server.core.model import OBSERVED
from bso_server.simulate.workload import Epoch, SizeTrace, Workload
from zeus_plugins.protocol import JobView, Origin, TrialState, TrialView

_TRAIN_COLUMNS = ("dataset", "network", "batch_size", "optimizer", "target_metric", "target_epoch")
_POWER_COLUMNS = ("dataset", "network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power")

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of a workload in the traces. The traces' largest size up to `default_batch_size` is the default."""

    dataset: str
    network: str
    optimizer: str
    target_metric: float
    max_epochs: int
    default_batch_size: int

    @property
    def name(self) -> str:
        """Name of the workload for display."""
        return f"{self.dataset}/{self.network}"


PAPER_WORKLOADS = (
    Selection("cifar100", "shufflenetv2", "adadelta", 0.6, 100, 1024),
    Selection("imagenet", "resnet50", "adadelta", 0.65, 100, 256),
    Selection("squad", "bert_base_uncased", "adamw", 84.0, 6, 32),
    Selection("librispeech", "deepspeech2", "adamw", 40.0, 16, 256),
    Selection("movielens-1m", "ncf", "adam", 0.41, 100, 1024),
    Selection("sentiment140", "bert_base_uncased", "adamw", 0.84, 10, 128),
)
"""The six workloads of the Zeus paper, with the batch sizes that their authors use."""


@dataclass(frozen=True, slots=True)
class Traces:
    """Rows of both tables."""

    train: tuple[Row, ...]
    power: tuple[Row, ...]

    @classmethod
    def read(cls, train: Path, power: Path) -> Traces:
        """Read both tables from CSV files; raise `ValueError` if a file lacks a column."""
        return cls(_read(train, _TRAIN_COLUMNS), _read(power, _POWER_COLUMNS))

    def workload(self, selection: Selection) -> Workload:
        """Return a workload with the batch sizes that are in both traces.

        Raises:
            ValueError: No batch size is in both traces, or a value is not a number.
        """
        paths = self._paths(selection)
        epochs = self._epochs(selection)
        sizes = sorted(paths.keys() & epochs.keys())
        defaults = [size for size in sizes if size <= selection.default_batch_size]
        if not defaults:
            raise ValueError(
                f"the traces have no batch size up to {selection.default_batch_size} of {selection.name} with "
                f"{selection.optimizer} and target {selection.target_metric:g}: "
                f"{len(paths)} sizes in the train trace, {len(epochs)} in the power trace, {len(sizes)} in both"
            )
        return Workload(
            name=selection.name,
            sizes=tuple(SizeTrace(size, tuple(paths[size]), epochs[size]) for size in sizes),
            default_batch_size=defaults[-1],
            max_epochs=selection.max_epochs,
            max_power_w=max(limit for by_limit in epochs.values() for limit in by_limit),
        )

    def _paths(self, selection: Selection) -> dict[int, list[float]]:
        paths: dict[int, list[float]] = {}
        for row in _of(selection, self.train):
            if float(row["target_metric"]) == selection.target_metric:
                reached = float(row["target_epoch"] or math.nan)
                paths.setdefault(int(row["batch_size"]), []).append(math.inf if math.isnan(reached) else reached)
        return paths

    def _epochs(self, selection: Selection) -> dict[int, dict[float, Epoch]]:
        epochs: dict[int, dict[float, Epoch]] = {}
        for row in _of(selection, self.power):
            time_s = float(row["time_per_epoch"])
            epoch = Epoch(time_s, time_s * float(row["average_power"]))
            epochs.setdefault(int(row["batch_size"]), {})[float(row["power_limit"])] = epoch
        return epochs


def _of(selection: Selection, rows: Iterable[Row]) -> Iterable[Row]:
    wanted = (selection.dataset, selection.network, selection.optimizer)
    return (row for row in rows if (row["dataset"], row["network"], row["optimizer"]) == wanted)


def _read(file: Path, columns: Iterable[str]) -> tuple[Row, ...]:
    with file.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines)
        missing = sorted(set(columns) - set(table.fieldnames or ()))
        if missing:
            raise ValueError(f"{file} has no column {', '.join(missing)}")
        return tuple(table)


def recorded_workload(view: JobView) -> Workload:
    """Return a workload with the batch sizes that a job has tried, and the mean epochs of its trials.

    A trial that was stopped after k epochs would have needed more: it gets the epochs of the quickest run of its size
    that needed more than k, or infinity without such runs (compare Efron's redistribution to the right, 1967). A trial
    that used up its epochs gets infinity. Trials that crashed, ran out of memory, were abandoned or finished another
    run do not count. Power limits are not simulated: the trials ran under theirs.

    Raises:
        ValueError: No trial with known epochs has reached the target. Trials imported from Zeus have no known epochs.
    """
    job = view.job
    by_size: dict[int, list[TrialView]] = {}
    for trial in sorted(view.trials, key=lambda each: each.batch_size):
        if trial.state in OBSERVED and trial.origin is not Origin.FINISH and trial.epochs and trial.time_s:
            by_size.setdefault(trial.batch_size, []).append(trial)
    if not any(trial.state is TrialState.COMPLETED for own in by_size.values() for trial in own):
        raise ValueError(
            f"job {job.job_id}: no trial has reached the target yet, of those whose epochs are known, so that there is "
            "nothing to compare"
        )
    default = job.default_batch_size
    return Workload(
        name=job.job_id,
        sizes=tuple(
            SizeTrace(size, _epochs_to_target(own), {job.max_power: _mean_epoch(own)}) for size, own in by_size.items()
        ),
        default_batch_size=min(by_size, key=lambda size: (abs(math.log2(size / default)), size)),
        max_epochs=job.max_epochs,
        max_power_w=job.max_power,
    )


def _epochs_to_target(trials: Sequence[TrialView]) -> tuple[float, ...]:
    epochs = [(trial.state, math.ceil(trial.epochs or 0)) for trial in trials]
    reached = sorted(own for state, own in epochs if state is TrialState.COMPLETED)

    def needed(state: TrialState, own: int) -> float:
        if state is TrialState.COMPLETED:
            return own
        longer = (each for each in reached if each > own)
        return math.inf if state is TrialState.EXHAUSTED else next(longer, math.inf)

    return tuple(needed(state, own) for state, own in epochs)


def _mean_epoch(trials: Sequence[TrialView]) -> Epoch:
    epochs = sum(trial.epochs or 0 for trial in trials)
    time_s, energy_j = (sum(getattr(each, name) or 0 for each in trials) for name in ("time_s", "energy_j"))
    return Epoch(time_s / epochs, energy_j / epochs)
