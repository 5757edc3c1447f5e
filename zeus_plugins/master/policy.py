"""Batch sizes from the server's policies without a server: the same decisions, in this process and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSORuntimeError
from zeus_plugins.master.history import Run
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import EndReason, Origin, TrialState

if TYPE_CHECKING:
    from bso_server.core import model

__all__ = ["PolicyOptimizer"]

_CRASH_RETRIES = 3


class PolicyOptimizer:
    """The server's policy `zeus` on the costs of one job; needs the extra ``server``.

    Decisions rest on costs alone, so that neither η nor the hardware needs to be known here.

    Args:
        num_pruning_rounds: How often every batch size is tried before sizes are drawn.
        window_size: Number of latest observations per batch size that count. 0: all.
        mab_prior_mean: Mean of the prior over the reward (−cost, joules) of a batch size.
        mab_prior_precision: Precision (1/joules²) of that prior.
        mab_num_explorations: Least number of observations per batch size before it is drawn by merit.
        seed: Seed of the draws.

    Raises:
        ZeusBSOConfigError: The server is not installed here.
    """

    def __init__(
        self,
        *,
        num_pruning_rounds: int = 2,
        window_size: int = 0,
        mab_prior_mean: float = 0.0,
        mab_prior_precision: float = 0.0,
        mab_num_explorations: int = 2,
        seed: int = 123456,
    ) -> None:
        try:
            import bso_server.core.policy
        except ModuleNotFoundError as error:
            raise ZeusBSOConfigError(
                f"the policies of the server need {error.name}, which is not installed: pip install "
                "'zeus-plugins[server]'"
            ) from None
        self._policy = bso_server.core.policy
        self._options: dict[str, Any] = {
            "num_pruning_rounds": num_pruning_rounds,
            "window_size": window_size,
            "mab_prior_mean": mab_prior_mean,
            "mab_prior_precision": mab_prior_precision,
            "mab_num_explorations": mab_num_explorations,
        }
        self._seed = seed
        self._job: model.Job | None = None
        self._trials: list[model.TrialRecord] = []
        self._survivors: tuple[int, ...] | None = None
        self._events = 0

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """Get to know the job.

        Raises:
            ZeusBSOConfigError: This optimizer holds another job already, or the default size is none of the sizes.
        """
        from bso_server.core import model

        if self._job is not None and self._job.job_id != job.name:
            raise ZeusBSOConfigError(f"this optimizer holds job {self._job.job_id}: make another one for {job.name}")
        if job.default_bs not in batch_sizes:
            raise ZeusBSOConfigError(f"default_bs {job.default_bs} is not one of the batch sizes {batch_sizes}")
        self._job = model.Job(
            job_id=job.name,
            batch_sizes=tuple(sorted(set(batch_sizes))),
            default_batch_size=job.default_bs,
            # With η = 1 the core's cost is what it takes for energy: here, the cost observed.
            eta_knob=1.0,
            max_power=1.0,
            **self._options,
        )

    def predict(self, job: Job) -> int:
        """The batch size of the next run.

        Raises:
            ZeusBSOOperationOrderError: The job is not registered.
            ZeusBSORuntimeError: No batch size works.
        """
        import numpy as np

        from bso_server.core.history import History
        from bso_server.core.model import TrialRecord
        from bso_server.errors import NoSurvivorError

        known, number = self._registered(job), len(self._trials) + 1
        try:
            # A generator for each decision: nothing but its number needs to be kept.
            rng = np.random.default_rng((self._seed, number))
            suggestion = self._policy.suggest(History.of(known, self._trials, self._survivors), rng)
        except NoSurvivorError as error:
            raise ZeusBSORuntimeError(str(error)) from None
        self._survivors = suggestion.survivors or self._survivors
        self._trials.append(
            TrialRecord(
                trial_number=number,
                batch_size=suggestion.batch_size,
                state=TrialState.RUNNING,
                origin=suggestion.origin,
                started_event=self._next_event(),
            )
        )
        return suggestion.batch_size

    def observe(self, job: Job, batch_size: int, cost: float, converged: bool | None = None) -> None:
        """Learn what the run has cost, joules; one that has not reached the target (False, None) is censored there."""
        self._registered(job)
        self._end(
            batch_size,
            TrialState.COMPLETED if converged else TrialState.EARLY_STOPPED,
            EndReason.TARGET_REACHED if converged else EndReason.COST_BOUND_CROSSED,
            cost_j=cost,
        )

    def observe_run(self, job: Job, run: Run) -> None:
        """Learn of a run; one without a result has its size tried again, up to a limit, or excluded."""
        if run.was_measured:
            self.observe(job, run.bs, run.cost, run.reached)
        elif run.outcome == "infeasible":
            self._end(run.bs, TrialState.INFEASIBLE, EndReason.OUT_OF_MEMORY)
        else:
            ended = [trial for trial in self._trials if trial.batch_size == run.bs]
            crashes = 1 + sum(trial.end_reason is EndReason.CRASHED for trial in ended)
            observed = any(trial.metric is not None for trial in ended)
            state, reason = self._policy.outcome_of_crash(crashes=crashes, observed=observed, retries=_CRASH_RETRIES)
            self._end(run.bs, state, reason)

    def state_dict(self) -> dict[str, Any]:
        """All trials, and the sizes that survived the exploration."""
        return {
            "trials": [asdict(trial) for trial in self._trials],
            "survivors": self._survivors,
            "events": self._events,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        from bso_server.core.model import TrialRecord

        self._trials = [
            TrialRecord(
                **{
                    **trial,
                    "state": TrialState(trial["state"]),
                    "origin": Origin(trial["origin"]),
                    "end_reason": None if trial["end_reason"] is None else EndReason(trial["end_reason"]),
                }
            )
            for trial in state["trials"]
        ]
        self._survivors = None if state["survivors"] is None else tuple(state["survivors"])
        self._events = state["events"]

    def _registered(self, job: Job) -> model.Job:
        if self._job is None or self._job.job_id != job.name:
            raise ZeusBSOOperationOrderError(f"job {job.name} is not registered: call register_job first")
        return self._job

    def _end(self, batch_size: int, state: TrialState, reason: EndReason, *, cost_j: float | None = None) -> None:
        running = [trial for trial in self._trials if trial.state is TrialState.RUNNING]
        if not running or running[-1].batch_size != batch_size:
            raise ZeusBSOOperationOrderError(f"batch size {batch_size} was not predicted: call predict before observe")
        ended = replace(running[-1], state=state, end_reason=reason, ended_event=self._next_event())
        if cost_j is not None:
            ended = replace(ended, energy_j=cost_j, metric=float(state is TrialState.COMPLETED), reports=1)
        self._trials[ended.trial_number - 1] = ended

    def _next_event(self) -> int:
        self._events += 1
        return self._events
