"""Reading traces: two tables as the Zeus paper published them (NSDI '23), joined to a `Workload`.

Train trace: a row per training run and target metric, with the epoch at which that was reached (``target_epoch``; empty
or ``nan``: never). Power trace: a row per batch size and power limit, with seconds per epoch and average watts.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bso_server.simulate.workload import Epoch, SizeTrace, Workload

_TRAIN_COLUMNS = ("dataset", "network", "batch_size", "optimizer", "target_metric", "target_epoch")
_POWER_COLUMNS = ("dataset", "network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power")

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice of a workload in the traces.

    Attributes:
        dataset: As in the traces; likewise `network` and `optimizer`.
        target_metric: One of the train trace's.
        max_epochs: A run that has not reached the target by then has failed.
        default_batch_size: Where the traces have no such size, the largest they have below it.
    """

    dataset: str
    network: str
    optimizer: str
    target_metric: float
    max_epochs: int
    default_batch_size: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.dataset}/{self.network}"


PAPER_WORKLOADS = (
    Selection("cifar100", "shufflenetv2", "adadelta", 0.6, 100, 1024),
    Selection("imagenet", "resnet50", "adadelta", 0.65, 100, 256),
    Selection("squad", "bert_base_uncased", "adamw", 84.0, 6, 32),
    Selection("librispeech", "deepspeech2", "adamw", 40.0, 16, 256),
    Selection("movielens-1m", "ncf", "adam", 0.41, 100, 1024),
    Selection("sentiment140", "bert_base_uncased", "adamw", 0.84, 10, 128),
)
"""The six of the Zeus paper, with the batch sizes that their authors use."""


@dataclass(frozen=True, slots=True)
class Traces:
    """The rows of both tables."""

    train: tuple[Row, ...]
    power: tuple[Row, ...]

    @classmethod
    def read(cls, train: Path, power: Path) -> Traces:
        """Read both from CSV files; `ValueError` if a file lacks a column."""
        return cls(_read(train, _TRAIN_COLUMNS), _read(power, _POWER_COLUMNS))

    def workload(self, selection: Selection) -> Workload:
        """One workload: the batch sizes that both traces have.

        Raises:
            ValueError: There are none, or a number in them is none.
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
