"""Landscapes of batch sizes drawn by chance, by the laws of training or against them, and jobs played on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bso_server.simulate.play import Conditions, Played, Simulation, job_of
from bso_server.simulate.workload import Epoch, Landscape, SizeTrace, Workload, landscape
from zeus_plugins.protocol import GP_VOI, Origin

_POWER_W = 200.0


def workload(
    batch_sizes: Sequence[int], epochs: Sequence[float], epoch_j: Sequence[float], default: int, spread: float = 0.0
) -> Workload:
    """A workload whose cost is its energy; of four runs at a size, epochs differ by a σ of about `spread` in log."""
    sizes = []
    for batch_size, needed, cost_j in zip(batch_sizes, epochs, epoch_j, strict=True):
        runs = (needed * math.exp(spread * z) for z in (-1.2, -0.4, 0.4, 1.2))
        sizes.append(SizeTrace(batch_size, tuple(max(round(run), 1) for run in runs), {_POWER_W: Epoch(1.0, cost_j)}))
    max_epochs = int(3 * max(epochs) * math.exp(1.2 * spread)) + 1
    return Workload("drawn", tuple(sizes), default, max_epochs, _POWER_W)


@dataclass(frozen=True)
class Case:
    """A workload, and what happens to it.

    Trials with the numbers `slowed` cost four times as much. From recurrence `changes_at` on, the workload is `later`.
    `noise` is the σ of the log of a trial's cost on a busy machine.
    """

    workload: Workload
    slowed: tuple[int, ...] = ()
    later: Workload | None = None
    changes_at: int = 0
    noise: float = 0.0

    def play(self, recurrences: int, *, seed: int = 0, concurrency: int = 1, beta: float | None = 2.0) -> Outcomes:
        """Let a job of policy `gp_voi` recur so many times."""
        first, later = (
            landscape(each, eta=1.0, optimal_power_limits=False)
            for each in (self.workload, self.later or self.workload)
        )
        fields = {"max_power": _POWER_W, "eta_knob": 1.0, "beta_knob": beta, "max_epochs": self.workload.max_epochs}
        job = job_of(first, GP_VOI, seed=seed, **fields)
        conditions = Changing(first, case=self, later=later)
        played = Simulation(job, conditions, recurrences=recurrences, concurrency=concurrency, seed=seed).play()
        return Outcomes(played, {size: each.expected_cost_j for size, each in later.profiles.items()})


@dataclass(frozen=True, kw_only=True)
class Changing(Conditions):
    """The conditions of a case; `later` is the landscape after its change."""

    case: Case
    later: Landscape

    def landscape_at(self, recurrence: int) -> Landscape:
        """The landscape before or after the change."""
        return self.landscape if recurrence < self.case.changes_at else self.later

    def slowness(self, trial_number: int, draws: np.random.Generator) -> float:
        """That of a busy machine, in which `noise` is the σ of its log."""
        factor = math.exp(self.case.noise * draws.standard_normal()) if self.case.noise else 1.0
        return 4.0 * factor if trial_number in self.case.slowed else factor


@dataclass(frozen=True)
class Outcomes:
    """A job that was played, and what a run of each size really costs in the end (J)."""

    played: Played
    costs_j: dict[int, float]

    @property
    def best_j(self) -> float:
        """The lowest of these costs."""
        return min(self.costs_j.values())

    def sizes_of_last(self, recurrences: int) -> list[int]:
        """Sizes of the trials of so many recurrences at the end."""
        first = len(self.played.costs_j) - recurrences
        return [trial.record.batch_size for trial in self.played.trials if trial.recurrence >= first]

    def share_of_best(self, recurrences: int, tolerance: float) -> float:
        """Share of those that cost no more than the best size, but for this tolerance."""
        sizes = self.sizes_of_last(recurrences)
        return sum(self.costs_j[size] <= (1 + tolerance) * self.best_j for size in sizes) / len(sizes)

    @property
    def missed(self) -> set[int]:
        """Sizes that cost 10 % less than the one that is played in the end, and were never tried."""
        sizes = self.sizes_of_last(50)
        final = max(set(sizes), key=sizes.count)
        tried = {trial.record.batch_size for trial in self.played.trials}
        return {size for size, cost_j in self.costs_j.items() if cost_j < 0.9 * self.costs_j[final]} - tried

    @property
    def extra_runs(self) -> float:
        """The cost beyond that of the best size, in runs of it."""
        return sum(self.played.costs_j) / self.best_j - len(self.played.costs_j)

    @property
    def tries(self) -> list[int]:
        """Recurrences of the trials that were tries."""
        return [trial.recurrence for trial in self.played.trials if trial.record.origin is not Origin.INCUMBENT]


def drawn(kind: str, seed: int) -> Case:
    """A job by the laws of `bso_server.core.gp_voi.prior`, or one that breaks them as `kind` says."""
    rng = np.random.default_rng([seed, sum(kind.encode())])
    x = np.arange(int(rng.integers(4, 10))) * float(rng.choice([1.0, 0.585])) + 3
    sizes = [round(2**each) for each in x]
    rise = float(rng.choice([0.5, 1.0])) * np.log1p(2 ** (x - rng.uniform(x[0] - 1, x[-1] + 2)))
    fall = np.log1p(4 ** (rng.uniform(x[0] - 3, x[0] + 1) - x))
    epochs = rng.uniform(8, 60) * np.exp(rise + fall)
    epoch_j = 10 * (1 + 2 ** (rng.uniform(x[0] - 2, x[-1] + 2) - x))
    default = sizes[int(rng.integers(len(sizes)))]
    if kind == "dip":
        epochs[int(rng.integers(len(epochs)))] *= 0.4
    elif kind == "shuffled":
        epochs = rng.permutation(epochs)
    elif kind == "two sizes":
        first = int(rng.integers(len(sizes) - 1))
        sizes, epoch_j = sizes[first : first + 2], epoch_j[first : first + 2]
        epochs = epochs[first : first + 2] * np.exp(rng.normal(0, 0.5, 2))
        default = sizes[int(rng.integers(2))]
    case = Case(workload(sizes, epochs, epoch_j, default, 0.08))
    if kind == "drift":
        return replace(case, later=workload(sizes, epochs[::-1], epoch_j, default, 0.08), changes_at=150)
    slowed = {"first run slowed": (1,), "second run slowed": (2,)}
    return replace(case, slowed=slowed.get(kind, ()), noise=0.3 if kind == "noise" else 0.0)
