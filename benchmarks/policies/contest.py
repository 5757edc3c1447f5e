"""The contenders of the report, the server's policies and their rivals alike, and their costs of a job."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.policies.cases import Case
from benchmarks.policies.optuna_study import SAMPLERS, OptunaStudy, load_optuna
from benchmarks.policies.rivals import Clairvoyant, Default, Rival, Rounds, Thompson
from bso_server.simulate.workload import Epoch
from zeus_plugins.protocol import OWN_POLICIES, cost

# A recurrence whose runs miss the target so often in a row costs infinitely much.
_PATIENCE = 100

FLOOR = "floor"

RIVALS: dict[str, Callable[[Case, int], Rival]] = {
    "default": lambda case, _: Default(case.workload.default_batch_size),
    "grid": lambda case, _: Rounds(*_sizes(case)),
    "halving": lambda case, _: Rounds(*_sizes(case), halving=True),
    "thompson": lambda case, seed: Thompson(*_sizes(case), seed),
    "optuna-tpe": lambda case, seed: OptunaStudy(*_sizes(case), "optuna-tpe", seed),
    "optuna-gp": lambda case, seed: OptunaStudy(*_sizes(case), "optuna-gp", seed),
    FLOOR: lambda case, _: Clairvoyant(case),
}
"""A strategy for a case and a seed, by name."""

CONTENDERS = [*OWN_POLICIES, *RIVALS]
"""Names of all: the server's own policies first, the floor last. Policies of other packages can be played, too."""


def check_requirements(names: list[str]) -> None:
    """Raise `CommandError` if one of these contenders needs a package that is not installed."""
    if SAMPLERS.keys() & set(names):
        load_optuna()


class Paid(NamedTuple):
    """The costs of one job.

    Attributes:
        costs_j: Cost of each recurrence, joules, shape (recurrences,); infinite if it is never finished.
        given_up: Recurrences that a policy gave up, so that the default had to finish them.
    """

    costs_j: list[float]
    given_up: int = 0


def paid(case: Case, name: str, seed: int) -> Paid:
    """The costs of one seed's job with one of the contenders, or with another policy that is installed."""
    if name in RIVALS:
        return Paid(_Contest(case, RIVALS[name](case, seed), seed).play())
    job = case.play(name, seed)
    return Paid(job.costs_j, job.unfinished)


def _sizes(case: Case) -> tuple[list[int], int]:
    return [size.batch_size for size in case.workload.sizes], case.workload.default_batch_size


class _Contest:
    """One job, played by a rival; the recorded run that a trial follows is drawn as in `simulate.play.Simulation`."""

    def __init__(self, case: Case, rival: Rival, seed: int) -> None:
        self._case, self._rival = case, rival
        self._draws = np.random.default_rng([seed, len(case.workload.sizes)])
        self._profiled: set[int] = set()
        self._trials = 0

    def play(self) -> list[float]:
        setting = self._case.setting
        costs_j: list[float] = []
        # Recurrences under way: end, number, size.
        under_way: list[tuple[float, int, int]] = []
        now_s = 0.0
        while len(costs_j) < setting.recurrences:
            if len(under_way) == setting.concurrency:
                now_s, number, batch_size = heapq.heappop(under_way)
                self._rival.learn(batch_size, costs_j[number])
            batch_size = self._rival.next_size()
            consumed = self._recur(batch_size, len(costs_j))
            heapq.heappush(under_way, (now_s + consumed.time_s, len(costs_j), batch_size))
            costs_j.append(self._cost_j(consumed))
        return costs_j

    def _recur(self, batch_size: int, recurrence: int) -> Epoch:
        """Time and energy of a run at a size, and of runs at the default for as long as none reached the target."""
        time_s = energy_j = 0.0
        for _ in range(_PATIENCE):
            run, reached = self._run(batch_size, recurrence)
            time_s, energy_j = time_s + run.time_s, energy_j + run.energy_j
            if reached:
                return Epoch(time_s, energy_j)
            batch_size = self._case.workload.default_batch_size
        return Epoch(math.inf, math.inf)

    def _run(self, batch_size: int, recurrence: int) -> tuple[Epoch, bool]:
        """Time and energy of one run, and True if it reached the target."""
        sizes = self._case.conditions.landscape_at(recurrence)
        profile = sizes.default if self._rival.full_power else sizes.profiles[batch_size]
        first = profile.epoch
        if profile.profiling and batch_size not in self._profiled:
            first = profile.profiling
        self._profiled.add(batch_size)
        self._trials += 1
        needed = profile.epochs_to_target[int(self._draws.integers(len(profile.epochs_to_target)))]
        slowness = self._case.conditions.slowness(self._trials, self._draws)
        epochs = math.ceil(min(needed, self._case.workload.max_epochs))
        factors = self._case.conditions.epoch_factors(epochs, self._draws)
        start, later = (1.0, epochs - 1) if factors is None else (float(factors[0]), float(factors[1:].sum()))
        run = Epoch(
            (start * first.time_s + later * profile.epoch.time_s) * slowness,
            (start * first.energy_j + later * profile.epoch.energy_j) * slowness,
        )
        return run, math.isfinite(needed)

    def _cost_j(self, consumed: Epoch) -> float:
        if math.isinf(consumed.time_s):
            return math.inf
        max_power_w, eta = self._case.workload.max_power_w, self._case.setting.eta
        return cost(energy_j=consumed.energy_j, time_s=consumed.time_s, max_power_w=max_power_w, eta=eta)
