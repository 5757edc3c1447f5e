"""``python -m benchmarks.learning_rates``: batch sizes and learning rates of two real trainings.

The models, data, optimizers and targets are those of `make proof`, in a plain PyTorch loop. Each size trains with the
rate of the rule "auto", with multiples of it, and with the rate of the default size. Kept results are not measured
again, so that the same command continues a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.recurrences.data import Data
from benchmarks.recurrences.harness import write_whole
from benchmarks.recurrences.lightning_tasks import making, optimizer_of
from benchmarks.recurrences.runs import Order, Run
from benchmarks.recurrences.tasks import TASKS, Task
from benchmarks.reports import RESULTS, machine
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.training.lr_scaling import lr_factor

NAMES = ("digits", "tabular")
SIZES = (32, 64, 128, 256, 512)
MULTIPLES = (1.0, 0.5, 2.0, 0.25, 4.0)
"""Of the rate of "auto", in the order of measurement."""
SEEDS = 5

_VALIDATION_BATCH = 500


@dataclass(frozen=True, slots=True)
class Cell:
    """A task, a batch size, and the factor on the rate of the default size."""

    task: str
    batch_size: int
    factor: float


@dataclass(frozen=True, slots=True)
class Training:
    """One training: whether and after how many epochs it reached the target, and its CPU time in seconds."""

    task: str
    batch_size: int
    factor: float
    seed: int
    reached: bool
    epochs: int
    cpu_s: float
    metric: float | None

    @property
    def cell(self) -> Cell:
        """The cell of the grid."""
        return Cell(self.task, self.batch_size, self.factor)


def auto_factor(task: str, size: int) -> float:
    """Return the factor of "auto": the optimizer's own rule, by which `make proof` scales its rates."""
    return lr_factor(TASKS[task].lr_scaling, size, TASKS[task].default_batch_size)


def cells(task: str) -> list[Cell]:
    """Return the cells of a task: multiples of the rate of "auto" at each size, and the default's rate."""
    factors = [(size, round(multiple * auto_factor(task, size), 6)) for multiple in MULTIPLES for size in SIZES]
    return [Cell(task, *each) for each in dict.fromkeys([*factors, *((size, 1.0) for size in SIZES)])]


def train(cell: Cell, seed: int) -> Training:
    """Train until the target or the last epoch; a loss that is not finite ends the training."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[cell.task]
    order = Order(cell.task, "", seed, batch_size=cell.batch_size, with_callback=False)
    samples, network, optimizer_name, lr = making(Run(order, task, None, "", EstimateMonitor(1.0), Path()))
    optimizer = optimizer_of(optimizer_name, network.parameters(), lr * cell.factor)
    begun = time.process_time()
    inputs, targets = samples.train
    epochs, metric = 0, -math.inf
    while epochs < task.max_epochs and not (metric >= task.target or math.isnan(metric)):
        epochs += 1
        for places in torch.randperm(len(inputs)).split(cell.batch_size):
            loss = _loss(task, network(inputs[places]), targets[places])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            optimizer.step()
        metric = _metric(task, network, samples) if bool(loss.isfinite()) else math.nan
    return Training(
        **asdict(cell),
        seed=seed,
        reached=metric >= task.target,
        epochs=epochs,
        cpu_s=round(time.process_time() - begun, 3),
        metric=None if math.isnan(metric) else round(metric, 4),
    )


def _loss(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if task.metric == "val_r2":
        return nn.functional.mse_loss(outputs.squeeze(1), targets)
    return nn.functional.cross_entropy(outputs, targets)


@torch.no_grad()
def _metric(task: Task, network: nn.Module, samples: Data) -> float:
    inputs, targets = samples.validation
    outputs = torch.cat([network(part) for part in inputs.split(_VALIDATION_BATCH)])
    if task.metric == "val_r2":
        errors = (outputs.squeeze(1) - targets).pow(2).sum()
        return float(1 - errors / (targets - targets.mean()).pow(2).sum())
    return float((outputs.argmax(dim=1) == targets).float().mean())


def measure(file: Path, seeds: int, minutes: float) -> list[Training]:
    """Measure the trainings that the file lacks, for so many minutes; return all."""
    kept = read(file) if file.exists() else []
    done = {(training.cell, training.seed) for training in kept}
    end = time.monotonic() + 60 * minutes
    head = f'{{"machine": {json.dumps(machine())},\n"trainings": [\n'
    for seed in range(seeds):
        for cell in (cell for task in NAMES for cell in cells(task)):
            if (cell, seed) in done:
                continue
            if time.monotonic() >= end:
                return kept
            kept.append(train(cell, seed))
            rows = ",\n".join(json.dumps(asdict(training)) for training in kept)
            write_whole(file, f"{head}{rows}\n]}}\n")
    return kept


def read(file: Path) -> list[Training]:
    """Return the kept trainings."""
    return [Training(**training) for training in json.loads(file.read_text("utf-8"))["trainings"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is left, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_rates", description=__doc__)
    parser.add_argument("--file", type=Path, default=RESULTS / "learning_rates.json")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=25.0, help="measure no longer; 0: only print the tables")
    options = parser.parse_args(arguments)
    measure(options.file, options.seeds, options.minutes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
