"""Optuna as a rival: one study for each job, whose objective is the cost of a recurrence."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.policies.rivals import Rival
from bso_server.cli.common import CommandError

SAMPLERS = {"optuna-tpe": "TPESampler", "optuna-gp": "GPSampler"}
"""Optuna's samplers by the names of the rivals; both as Optuna has them without further arguments."""

TRIALS = 20
"""A study's trials; what cost least in them is played from then on."""


class OptunaStudy(Rival):
    """A study of `TRIALS` recurrences, which begins with the default; then the size of its best trial for ever.

    The parameter is the size's place in their order, as an integer, so that a sampler may know which are neighbours.
    """

    def __init__(self, sizes: Sequence[int], default: int, sampler: str, seed: int) -> None:
        optuna = load_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sizes = list(sizes)
        self._study = optuna.create_study(sampler=getattr(optuna.samplers, SAMPLERS[sampler])(seed=seed))
        self._study.enqueue_trial({"place": self._sizes.index(default)})
        self._asked = 0
        # Cost (J) and size of the best trial; Optuna would look it up among copies of all trials.
        self._best: tuple[float, int] | None = None
        self._under_way: dict[int, list[Any]] = defaultdict(list)

    def next_size(self) -> int:
        """The next trial's, or the best trial's."""
        if self._asked >= TRIALS and self._best is not None:
            return self._best[1]
        self._asked += 1
        trial = self._study.ask()
        size: int = self._sizes[trial.suggest_int("place", 0, len(self._sizes) - 1)]
        self._under_way[size].append(trial)
        return size

    def learn(self, batch_size: int, cost_j: float) -> None:
        """As in `Rival.learn`."""
        if self._under_way[batch_size]:
            self._study.tell(self._under_way[batch_size].pop(0), cost_j)
            self._best = min(self._best or (cost_j, batch_size), (cost_j, batch_size))


def load_optuna() -> Any:
    """The module.

    Raises:
        CommandError: Optuna, or what its Gaussian process needs, is not installed.
    """
    try:
        import optuna

        importlib.import_module("scipy")
        importlib.import_module("torch")
    except ImportError as error:
        raise CommandError(
            f"Optuna's samplers need another package ({error}): pip install 'zeus-plugins[bench]'"
        ) from error
    return optuna
