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
from statistics import median

import torch
from torch import nn

from benchmarks.recurrences.data import Data
from benchmarks.recurrences.harness import write_whole
from benchmarks.recurrences.lightning_tasks import making, optimizer_of
from benchmarks.recurrences.runs import Order, Run
from benchmarks.recurrences.tasks import TASKS, Task
from benchmarks.reports import RESULTS, machine
from benchmarks.tables import markdown_table, write_tables
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.training.lr_scaling import lr_factor

NAMES = ("digits", "tabular")
SIZES = (32, 64, 128, 256, 512)
MULTIPLES = (1.0, 0.5, 2.0, 0.25, 4.0)
"""Multiples of the rate of rule "auto", in the order of measurement."""
BASES = (1.0, 4.0)
"""Rates from which a user may start, as multiples of the script's rate: its own, and the best for its batch size."""
SEEDS = 5


@dataclass(frozen=True, slots=True)
class Cell:
    """A task, a batch size, and the learning rate as a multiple of the default size's rate."""

    task: str
    batch_size: int
    factor: float


@dataclass(frozen=True, slots=True)
class Training:
    """One training: whether it reached the target, its number of epochs, and its CPU time in seconds."""

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
        """The training's cell of the grid."""
        return Cell(self.task, self.batch_size, self.factor)


def auto_factor(task: str, size: int) -> float:
    """Return the factor of rule "auto": the scaling rule for the task's optimizer that `make proof` uses, too."""
    return lr_factor(TASKS[task].lr_scaling, size, TASKS[task].default_batch_size)


def cells(task: str) -> list[Cell]:
    """Return the cells of a task: multiples of "auto"'s rate at each size, then the size-independent `BASES`."""
    factors = [(size, round(multiple * auto_factor(task, size), 6)) for multiple in MULTIPLES for size in SIZES]
    return [
        Cell(task, *each) for each in dict.fromkeys([*factors, *((size, base) for base in BASES for size in SIZES)])
    ]


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
        order_of_samples = torch.randperm(len(inputs))
        for first in range(0, len(inputs), cell.batch_size):
            places = order_of_samples[first : first + cell.batch_size]
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
    """Return the trainings that the file holds."""
    return [Training(**training) for training in json.loads(file.read_text("utf-8"))["trainings"]]


# The cost of a training is its number of epochs times the CPU seconds of an epoch at its size: the median over all
# trainings at the size, so that other work on the machine has little effect.

Costs = dict[Cell, list[tuple[float, bool]]]
"""Cost in CPU seconds and success of each training, by cell."""


def costs_of(trainings: Sequence[Training]) -> Costs:
    """Return the costs of all trainings."""
    pace = {
        each: median(training.cpu_s / training.epochs for training in trainings if place(training) == each)
        for each in {place(training) for training in trainings}
    }
    costs: Costs = {}
    for training in trainings:
        costs.setdefault(training.cell, []).append((training.epochs * pace[place(training)], training.reached))
    return costs


def place(training: Training | Cell) -> tuple[str, int]:
    """Return the task and the batch size."""
    return training.task, training.batch_size


def per_target(runs: Sequence[tuple[float, bool]]) -> float:
    """Return the mean cost to reach the target: the cost of all runs, divided by the number of successful runs."""
    reached = sum(success for _, success in runs)
    return sum(cost for cost, _ in runs) / reached if reached else math.inf


def chosen(costs: Costs, candidates: Sequence[Cell]) -> float:
    """Return the leave-one-out cost of the best candidate: chosen on all seeds but one, and paid on the seed left."""
    runs = min(len(costs[cell]) for cell in candidates)
    paid = []
    for left in range(runs):
        best = min(candidates, key=lambda cell: per_target([*costs[cell][:left], *costs[cell][left + 1 :]]))
        paid.append(costs[best][left])
    return per_target(paid)


def rules_of(costs: Costs, task: str) -> dict[str, list[list[Cell]]]:
    """Return for each rule and size the measured cells from which the rule may choose."""
    at = {size: [cell for cell in costs if place(cell) == (task, size)] for size in SIZES}
    rules = {}
    for base in BASES:
        start = "" if base == 1.0 else f", from {base:g} × the rate"
        rules[f"`none`{start}"] = [[Cell(task, size, base)] for size in SIZES]
        rules[f"`auto`{start}"] = [[Cell(task, size, round(base * auto_factor(task, size), 6))] for size in SIZES]
    return rules | {"best factor": [at[size] for size in SIZES]}


def cost_table(costs: Costs) -> str:
    """Return the table of costs by size and rule."""
    lines = [["task", "learning rate", *map(str, SIZES), "best size", "over the oracle of sizes and rates"]]
    for task in NAMES:
        rules = rules_of(costs, task)
        oracle = chosen(costs, [cell for each in rules["best factor"] for cell in each])
        for rule, options in rules.items():
            found = [chosen(costs, each) for each in options]
            best = chosen(costs, [cell for each in options for cell in each])
            size = str(SIZES[found.index(min(found))])
            lines.append([task, rule, *(_number(cost) for cost in found), size, f"{best / oracle:.2f}"])
    return markdown_table(lines)


def _number(cost: float) -> str:
    return f"{cost:.3g}" if math.isfinite(cost) else "∞"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the missing trainings, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_rates", description=__doc__)
    parser.add_argument("--file", type=Path, default=RESULTS / "learning_rates.json")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=25.0, help="measure no longer; 0: only make the tables")
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="documents with marks")
    options = parser.parse_args(arguments)
    table = cost_table(costs_of(measure(options.file, options.seeds, options.minutes)))
    print(table)
    write_tables({"learning-rates": table}, options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
