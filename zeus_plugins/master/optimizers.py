"""The interface of the object that chooses a master's batch sizes: Zeus's, and what it may offer beyond."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from zeus_plugins.master.history import Run
from zeus_plugins.master.job import Job


class BatchSizeChooser(Protocol):
    """Chooses the batch size of each run. Zeus's `BatchSizeOptimizer` classes fit."""

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """Get to know a job; called once before anything else, and again after a resume."""

    def predict(self, job: Job) -> int:
        """The batch size of the next run."""

    def observe(self, job: Job, batch_size: int, cost: float, converged: bool | None = None) -> None:
        """Learn what a run has cost, joules, and whether it reached the target."""


@runtime_checkable
class RunObserver(Protocol):
    """A `BatchSizeChooser` that wants the whole run, in place of `observe`."""

    def observe_run(self, job: Job, run: Run) -> None:
        """Learn of a run. After a crash of the master it may be told of the same run again."""


@runtime_checkable
class KeepsState(Protocol):
    """A `BatchSizeChooser` whose state can be kept as JSON.

    One that is not has its calls repeated after a resume: `predict` and `observe` for each run of the history.
    """

    def state_dict(self) -> dict[str, Any]:
        """Its state, in what JSON can hold."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; called before `register_job`."""


@runtime_checkable
class Interruptible(Protocol):
    """A `BatchSizeChooser` that wants to know that the master ends."""

    def interrupt(self) -> None:
        """The master ends while a run may be under way, which will go on when the master is resumed."""
