"""The history of a master on disk, which determines the next run, and its runs in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig, SavingsView, TrialState, printable
from zeus_plugins.train_result import write_atomically

MAX_TRIES = 20
"""Number of runs after which the master gives up a recurrence."""

HISTORY_FILE = "history.json"


class _Kept(BaseModel):
    # JSON has no infinite number: write an infinite cost bound as the string "Infinity".
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class PlannedRun(_Kept):
    """A run that the master has decided on.

    Attributes:
        recurrence: Number of the recurrence within the job, from 1.
        tries: Number of the run within the recurrence, from 1.
        bs: Global batch size.
        cost_ub: Upper bound of the cost in joules; infinite before the first completed run.
    """

    recurrence: int
    tries: int
    job_id: str
    bs: int
    learning_rate: float
    seed: int
    cost_ub: float


class Run(PlannedRun):
    """A run that has ended, with the fields of Zeus's `HistoryEntry`.

    Attributes:
        pl: Power limit of each GPU in watts; None if the run chose none.
        energy: Joules; for a failed run the upper bound, maximum power × time.
        time: Seconds.
        cost: ``η·energy + (1 − η)·max_power·time``, joules.
        reached: True if the run reached the target metric.
        outcome: ``completed`` (target reached), ``early_stopped`` or ``exhausted`` (a result without the target),
            ``failed`` or ``infeasible`` (no result).
        reason: The outcome in words.
        end_epoch: Epochs trained; None if unknown.
        metric: Last validation metric; None if unknown.
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
        """True if the script left a result."""
        return self.outcome not in (TrialState.FAILED, TrialState.INFEASIBLE)


@dataclass(frozen=True)
class NextRun:
    """Values of the next run, derived from the history."""

    recurrence: int
    tries: int
    seed: int
    cost_ub: float

    @classmethod
    def after(cls, history: Sequence[Run], *, seed: int, beta_knob: float | None) -> NextRun:
        """Derive the values from all runs so far and `seed`, the seed of the first run.

        A recurrence ends when it reaches the target or the master gives it up. Its cost is the sum over its tries; the
        bound is β times the cost of the cheapest recurrence that reached the target. Each run increments the seed.
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
    """State from which a master resumes; the content of ``history.json``.

    Attributes:
        beta_knob: β of the cost bound; None: no bound.
        seed: Seed of the first run.
        running: The planned run that has not ended.
        observed: Number of runs that the optimizer has observed.
        optimizer: The optimizer's state; None before it is saved.
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
        """Values of the next run."""
        return NextRun.after(self.history, seed=self.seed, beta_knob=self.beta_knob)

    def write(self, logdir: Path) -> None:
        """Write the file atomically."""
        write_atomically(logdir / HISTORY_FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, logdir: Path) -> MasterState:
        """Read the file.

        Raises:
            ZeusBSOConfigError: The file does not exist, or does not contain a history.
        """
        path = logdir / HISTORY_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ZeusBSOConfigError(f"{path} does not exist: there is nothing to resume") from None
        except ValidationError as error:
            raise ZeusBSOConfigError(f"{path} was not written by this version of the master: {error}") from None


def begun_in_words(run: PlannedRun) -> str:
    """Return a line with the settings of a run that begins."""
    bound = "" if math.isinf(run.cost_ub) else f", at most {run.cost_ub:.4g} J"
    return f"{run.job_id}: batch size {run.bs}, learning rate {run.learning_rate:.4g}{bound}"


def ended_in_words(run: Run) -> str:
    """Return a line with the outcome and the costs of a run."""
    outcome = printable(run.reason if run.was_measured else f"{run.outcome}: {run.reason}")
    return f"{run.job_id}: {outcome}; {run.time:.1f} s, {run.energy:.4g} J, cost {run.cost:.4g} J"


def conclusion(history: Sequence[Run], savings: SavingsView | None) -> str:
    """Return a text with the verdict on the job's saving, if known, and total time and energy."""
    reached = [run for run in history if run.reached]
    lines = [
        *([] if savings is None else [savings.in_words]),
        f"{len(reached)} of {len(history)} runs reached the target, in {sum(run.time for run in reached):.1f} s and "
        f"{sum(run.energy for run in reached):.4g} J; all runs took {sum(run.time for run in history):.1f} s and "
        f"{sum(run.energy for run in history):.4g} J.",
        f"Energy: {', '.join(sorted({run.energy_source or 'as the script says' for run in history})) or 'none'}.",
    ]
    return "\n".join(lines)
