"""``python -m benchmarks.learning_rates``: forms of the rule "auto" on three real trainings.

The models, data, optimizers and targets are those of `make proof`, in a plain PyTorch loop. Each size trains with the
script's rate, half and twice of it, and with these rates times the factor of the optimizer's rule. Kept results are not
measured again, so that the same command continues a measurement.
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
from benchmarks.tables import markdown_table, write_tables

RULES = {"digits": "linear", "tabular": "sqrt", "digits-adam": "sqrt"}
"""The rule of each task's optimizer: SGD, AdamW and Adam."""
SIZES = (8, 16, 32, 64, 128, 256, 512)
BASES = (1.0, 0.5, 2.0)
"""Rates from which a user may start, as multiples of the script's rate."""
SEEDS = 3
STEP = 100
"""Cost of an optimizer step in samples, beside the samples of its batch."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A task, a batch size, and the learning rate as a multiple of the script's rate."""

    task: str
    batch_size: int
    factor: float


@dataclass(frozen=True, slots=True)
class Training:
    """One training: whether it reached the target, its number of epochs, and its cost in samples."""

    task: str
    batch_size: int
    factor: float
    seed: int
    reached: bool
    epochs: int
    cost: int

    @property
    def cell(self) -> Cell:
        """The training's cell of the grid."""
        return Cell(self.task, self.batch_size, self.factor)


def scaled(task: str, size: int, base: float) -> Cell:
    """Return the cell at which the rate `base` is scaled by the rule of the task's optimizer."""
    ratio = size / TASKS[task].default_batch_size
    return Cell(task, size, round(base * (ratio if RULES[task] == "linear" else math.sqrt(ratio)), 6))


def cells(task: str) -> list[Cell]:
    """Return the cells of a task: at each size, each of the `BASES` as it is and scaled."""
    found = [(Cell(task, size, base), scaled(task, size, base)) for base in BASES for size in SIZES]
    return list(dict.fromkeys(cell for pair in found for cell in pair))


def train(cell: Cell, seed: int) -> Training:
    """Train until the target or the last epoch; a loss that is not finite ends the training."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[cell.task]
    order = Order(cell.task, "", seed, batch_size=cell.batch_size, with_callback=False)
    samples, network, optimizer_name, lr = making(Run(order, task, Path(), Path()))
    optimizer = optimizer_of(optimizer_name, network.parameters(), lr * cell.factor)
    inputs, targets = samples.train
    epochs, metric = 0, -math.inf
    while epochs < task.max_epochs and not (metric >= task.target or math.isnan(metric)):
        epochs += 1
        order_of_samples = torch.randperm(len(inputs))
        for first in range(0, len(inputs), cell.batch_size):
            places = order_of_samples[first : first + cell.batch_size]
            loss = _loss(task, network(inputs[places]), targets[places])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            optimizer.step()
        metric = _metric(task, network, samples) if bool(loss.isfinite()) else math.nan
    cost = epochs * (len(inputs) + STEP * math.ceil(len(inputs) / cell.batch_size))
    return Training(**asdict(cell), seed=seed, reached=metric >= task.target, epochs=epochs, cost=cost)


def _loss(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if task.metric == "val_r2":
        return nn.functional.mse_loss(outputs.squeeze(1), targets)
    return nn.functional.cross_entropy(outputs, targets)


@torch.no_grad()
def _metric(task: Task, network: nn.Module, samples: Data) -> float:
    inputs, targets = samples.validation
    outputs = network(inputs)
    if task.metric == "val_r2":
        errors = (outputs.squeeze(1) - targets).pow(2).sum()
        return float(1 - errors / (targets - targets.mean()).pow(2).sum())
    return float((outputs.argmax(dim=1) == targets).float().mean())


def measure(file: Path, seeds: int, minutes: float) -> list[Training]:
    """Measure trainings that the file lacks, until `minutes` have passed; return all trainings of the file."""
    kept = read(file) if file.exists() else []
    done = {(training.cell, training.seed) for training in kept}
    end = time.monotonic() + 60 * minutes
    head = f'{{"machine": {json.dumps(machine())},\n"trainings": [\n'
    for seed in range(seeds):
        for cell in (cell for task in RULES for cell in cells(task)):
            if (cell, seed) in done:
                continue
            if time.monotonic() >= end:
                return kept
            kept.append(train(cell, seed))
            rows = ",\n".join(json.dumps(asdict(training)) for training in kept)
            write_whole(file, f"{head}{rows}\n]}}\n")
    return kept


def read(file: Path) -> list[Training]:
    """Return the trainings that the file holds."""
    return [Training(**training) for training in json.loads(file.read_text("utf-8"))["trainings"]]


def cost_of(trainings: Sequence[Training], cell: Cell) -> float:
    """Return the mean cost to reach the target: the cost of all runs, divided by the number of successful runs."""
    runs = [training for training in trainings if training.cell == cell]
    reached = sum(training.reached for training in runs)
    return sum(training.cost for training in runs) / reached if reached else math.inf


def cost_table(trainings: Sequence[Training]) -> str:
    """Return the table of costs by size at the script's rate, in thousands of samples, and of savings at each rate."""
    saved = [f"saved by the best size, rate × {base:g}" for base in BASES]
    lines = [["task", "own size", "rule", *map(str, SIZES), *saved]]
    for task in RULES:
        own = TASKS[task].default_batch_size
        for form in ("unscaled", RULES[task]):
            costs = [
                [
                    cost_of(trainings, Cell(task, size, base) if form == "unscaled" else scaled(task, size, base))
                    for size in SIZES
                ]
                for base in BASES
            ]
            shares = (1 - min(each) / each[SIZES.index(own)] for each in costs)
            lines.append([task, str(own), form, *map(_number, costs[0]), *(f"{100 * share:.0f} %" for share in shares)])
    return markdown_table(lines)


def _number(cost: float) -> str:
    return f"{cost / 1000:.3g}" if math.isfinite(cost) else "∞"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the missing trainings, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_rates", description=__doc__)
    parser.add_argument("--file", type=Path, default=RESULTS / "learning_rates.json")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=25.0, help="measure no longer; 0: only make the tables")
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="documents with marks")
    options = parser.parse_args(arguments)
    table = cost_table(measure(options.file, options.seeds, options.minutes))
    print(table)
    write_tables({"learning-rates": table}, options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
