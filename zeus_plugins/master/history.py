"""The history of a master, as it is kept on disk, and what follows from it.

Nothing is counted twice: recurrence, try, seed and cost bound of the next run are all derived from the runs so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import GpuConfig, TrialState
from zeus_plugins.train_result import write_atomically

MAX_TRIES = 20
"""Runs of one recurrence after which it is given up."""

HISTORY_FILE = "history.json"


@dataclass(frozen=True)
class HistoryEntry:
    """One run of the script, as `ZeusMaster.run` returns it.

    Attributes:
        bs: Global batch size.
        pl: Power limit of each GPU in watts; None where the run chose none.
        energy: Joules.
        reached: True if the target metric was reached.
        time: Seconds.
    """

    bs: int
    pl: float | None
    energy: float
    reached: bool
    time: float


class _Kept(BaseModel):
    # An infinite cost bound is kept as the string "Infinity": JSON has no number for it.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class PlannedRun(_Kept):
    """A run that was decided on.

    Attributes:
        tries: Counts from 1 within the recurrence, and so do recurrences within the job.
        bs: Global batch size.
        cost_ub: Joules of cost that it must not cross; infinite when there is no bound yet.
    """

    recurrence: int
    tries: int
    job_id: str
    bs: int
    learning_rate: float
    seed: int
    cost_ub: float


class Run(PlannedRun):
    """A run that has ended.

    Attributes:
        pl: Power limit of each GPU in watts; None where the run chose none.
        energy: Joules. Of a failed run: the most that it can have used, maximum power × time.
        time: Seconds.
        cost: ``η·energy + (1 − η)·max_power·time``, joules.
        reached: True if the target metric was reached.
        outcome: ``completed`` (reached), ``early_stopped`` or ``exhausted`` (measured to an end short of it),
            ``failed`` or ``infeasible`` (no result).
        reason: The same in words.
        end_epoch: Epochs trained; None where unknown.
        metric: The last validation metric; None where unknown.
        energy_source: Source of the energy; None if the script does not name it.
    """

    pl: float | None = None
    energy: float
    time: float
    cost: float
    reached: bool
    outcome: Literal["completed", "early_stopped", "exhausted", "failed", "infeasible"]
    reason: str
    end_epoch: int | None = None
    metric: float | None = None
    energy_source: str | None = None

    @property
    def was_measured(self) -> bool:
        """True when the script left a result."""
        return self.outcome not in (TrialState.FAILED, TrialState.INFEASIBLE)


def run_of_cost(job: Job, batch_size: int, cost_j: float, *, time_s: float, reached: bool) -> Run:
    """A run of which a master has told no more than its cost, joules, as Zeus's do: all epochs at that energy."""
    return Run(
        recurrence=1,
        tries=1,
        job_id="",
        bs=batch_size,
        learning_rate=job.learning_rate(batch_size),
        seed=0,
        cost_ub=math.inf,
        energy=cost_j,
        time=time_s,
        cost=cost_j,
        reached=reached,
        outcome="completed" if reached else "early_stopped",
        reason="",
        end_epoch=job.max_epochs,
        energy_source="cost",
    )


@dataclass(frozen=True)
class NextRun:
    """The consequences of a history for the next run; recurrences that reached the target or were given up are over."""

    recurrence: int
    tries: int
    seed: int
    cost_ub: float

    @classmethod
    def after(cls, history: Sequence[Run], *, seed: int, beta_knob: float | None) -> NextRun:
        """Derive it from all runs so far, and the seed of the first.

        The cost of a recurrence is that of all its tries; the bound is β times the cheapest recurrence that reached the
        target. Every run gets the seed after that of the run before.
        """
        cheapest = spent = math.inf
        recurrence = tries = 1
        for run in history:
            spent = run.cost if tries == 1 else spent + run.cost
            if run.reached:
                cheapest = min(cheapest, spent)
            is_over = run.reached or tries == MAX_TRIES
            recurrence, tries = (recurrence + 1, 1) if is_over else (recurrence, tries + 1)
        bound = math.inf if beta_knob is None else beta_knob * cheapest
        return cls(recurrence, tries, seed + len(history), bound)


class MasterState(_Kept):
    """Everything that a master needs to go on; the content of ``history.json``.

    Attributes:
        job: The job's name.
        beta_knob: β of the cost bound; None: no bound.
        seed: Seed of the first run.
        history: The runs that have ended, in order.
        running: The run that was decided on and has not ended.
        observed: Number of runs of the history that the optimizer knows of.
        optimizer: The optimizer's own state; None where it keeps none.
    """

    version: Literal[1] = 1
    job: str
    batch_sizes: tuple[int, ...]
    beta_knob: float | None
    eta_knob: float
    target_metric: float
    default_bs: int
    seed: int
    gpus: GpuConfig
    history: tuple[Run, ...] = ()
    running: PlannedRun | None = None
    observed: int = 0
    optimizer: dict[str, Any] | None = None

    @property
    def next_run(self) -> NextRun:
        """The consequences of the history."""
        return NextRun.after(self.history, seed=self.seed, beta_knob=self.beta_knob)

    def write(self, logdir: Path) -> None:
        """Keep it; a crash meanwhile leaves the state before."""
        write_atomically(logdir / HISTORY_FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, logdir: Path) -> MasterState:
        """Read it again.

        Raises:
            ZeusBSOConfigError: There is none, or something else.
        """
        path = logdir / HISTORY_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ZeusBSOConfigError(f"{path} does not exist: there is nothing to resume") from None
        except ValidationError as error:
            raise ZeusBSOConfigError(f"{path} was not written by this version of the master: {error}") from None


def mean_costs(history: Sequence[Run]) -> dict[int, float]:
    """Mean cost in joules, per batch size, of the runs that reached the target."""
    costs: dict[int, list[float]] = {}
    for run in history:
        if run.reached:
            costs.setdefault(run.bs, []).append(run.cost)
    return {bs: sum(known) / len(known) for bs, known in sorted(costs.items())}


def cheapest_size(history: Sequence[Run]) -> int | None:
    """The batch size with the lowest mean cost, or None while none has reached the target."""
    means = mean_costs(history)
    return min(means, key=means.__getitem__) if means else None
