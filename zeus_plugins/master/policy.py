"""Batch sizes from the server's policies without a server: the same decisions, in this process and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSORuntimeError
from zeus_plugins.master.history import Run, run_of_cost
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import GP_VOI, ZEUS, Ending, EndReason, JobRegistration, Origin, StopRule, TrialState

if TYPE_CHECKING:
    from bso_server.core.job import InMemoryJob
    from bso_server.core.model import TrialRecord


_CRASH_RETRIES = 3

# The policy refuses a target that was reached for nothing, as no later run could beat it.
_LEAST_COST_J = 1e-6


class PolicyOptimizer:
    """The server's policies on the costs of one job; needs the extra ``server``.

    Decisions rest on costs and epochs alone, so that neither η nor the hardware needs to be known here. When a run is
    stopped is the master's decision, which knows the bound on its cost.

    Args:
        policy: Chooses the batch sizes, such as ``"gp_voi"`` or ``"zeus"`` (docs/policy.md). None: `gp_voi`, or the one
            of the state that is taken up. The other arguments but `seed` matter to policy `zeus` alone.
        num_pruning_rounds: Number of times that every batch size is tried before sizes are drawn.
        window_size: Number of latest observations per batch size that count. 0: all.
        mab_prior_mean: Mean of the prior over the reward (−cost, joules) of a batch size.
        mab_prior_precision: Precision (1/joules²) of that prior.
        mab_num_explorations: Least number of observations per batch size before it is drawn by merit.
        seed: Seed of the draws.

    Raises:
        ZeusBSOConfigError: The server is not installed here, or has no such policy.
    """

    def __init__(
        self,
        *,
        policy: str | None = None,
        num_pruning_rounds: int = 2,
        window_size: int = 0,
        mab_prior_mean: float = 0.0,
        mab_prior_precision: float = 0.0,
        mab_num_explorations: int = 2,
        seed: int = 123456,
    ) -> None:
        try:
            import bso_server.core.job
            import bso_server.core.registry
        except ModuleNotFoundError as error:
            raise ZeusBSOConfigError(
                f"the policies of the server need {error.name}, which is not installed: pip install "
                "'zeus-plugins[server]'"
            ) from None
        self._core = bso_server.core.job
        if policy is not None and (missing := bso_server.core.registry.find(policy).missing):
            raise ZeusBSOConfigError(missing)
        self._asked_policy = policy
        self._policy = policy or GP_VOI
        self._options: dict[str, Any] = {
            "num_pruning_rounds": num_pruning_rounds,
            "window_size": window_size,
            "mab_prior_mean": mab_prior_mean,
            "mab_prior_precision": mab_prior_precision,
            "mab_num_explorations": mab_num_explorations,
        }
        self._seed = seed
        self._known: InMemoryJob | None = None
        # In order of dispatch.
        self._trials: list[TrialRecord] = []
        self._survivors: tuple[int, ...] | None = None

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """Get to know the job.

        Raises:
            ZeusBSOConfigError: This optimizer holds another job already, or the default size is none of the sizes.
        """
        if self._known is not None and self._known.state.job_id != job.name:
            raise ZeusBSOConfigError(
                f"this optimizer holds job {self._known.state.job_id}: make another one for {job.name}"
            )
        if job.default_bs not in batch_sizes:
            raise ZeusBSOConfigError(f"default_bs {job.default_bs} is not one of the batch sizes {batch_sizes}")
        # Not validated: any text names a job of a master.
        registration = JobRegistration.model_construct(
            job_id_prefix=job.name,
            job_id=job.name,
            batch_sizes=tuple(sorted(set(batch_sizes))),
            default_batch_size=job.default_bs,
            # With η = 1 the core's cost is what it takes for energy: here, the cost observed.
            eta_knob=1.0,
            max_power=1.0,
            number_of_gpus=1,
            gpu_model="",
            # The master bounds the costs of its runs itself.
            beta_knob=None,
            # What a run reached is told as 1 or 0.
            target_metric=1.0,
            max_epochs=job.max_epochs,
            policy=self._policy,
            **self._options,
        )
        self._known = self._core.InMemoryJob(registration, self._trials, self._survivors)

    def predict(self, job: Job) -> int:
        """The batch size of the next run.

        Raises:
            ZeusBSOOperationOrderError: The job is not registered.
            ZeusBSORuntimeError: No batch size works.
        """
        import numpy as np

        from bso_server.errors import NoSurvivorError

        known = self._registered(job)
        try:
            # A generator for each decision: nothing but its number needs to be kept.
            trial = known.suggest(np.random.default_rng((self._seed, len(self._trials) + 1)))
        except NoSurvivorError as error:
            raise ZeusBSORuntimeError(str(error)) from None
        self._trials.append(trial)
        return trial.batch_size

    def observe(self, job: Job, batch_size: int, cost: float, converged: bool | None = None) -> None:
        """Learn what the run has cost, joules; one that has not reached the target (False, None) is censored there.

        The epochs that it took are unknown here: they count as `max_epochs`. `observe_run` knows better.
        """
        self._report(job, run_of_cost(job, batch_size, cost, time_s=0.0, reached=bool(converged)))

    def observe_run(self, job: Job, run: Run) -> None:
        """Learn of a run; one without a result has its size tried again, up to a limit, or excluded."""
        if run.was_measured:
            self._report(job, run)
            return
        ending = Ending(outcome=TrialState.INFEASIBLE if run.outcome == "infeasible" else TrialState.FAILED)
        number = self._running(job, run.bs).trial_number
        self._trials[number - 1] = self._registered(job).end(number, ending, retries=_CRASH_RETRIES)

    def state_dict(self) -> dict[str, Any]:
        """The policy, all trials, and the sizes that survived the exploration."""
        survivors = self._survivors if self._known is None else self._known.state.survivors
        trials = [{name: value for name, value in asdict(each).items() if value is not None} for each in self._trials]
        return {"policy": self._policy, "trials": trials, "survivors": survivors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, also in version 0.1.0, which knew policy `zeus` alone.

        Raises:
            ZeusBSOConfigError: Another policy was asked for than the job was begun with.
        """
        begun_with = state.get("policy", ZEUS)
        if self._asked_policy not in (None, begun_with):
            raise ZeusBSOConfigError(
                f"the job was begun with policy {begun_with}, not {self._asked_policy}: its trials were chosen by "
                "that one. Change it back, or start anew"
            )
        self._policy = begun_with
        self._trials = [_trial_from(trial) for trial in state["trials"]]
        self._survivors = None if state["survivors"] is None else tuple(state["survivors"])

    def _registered(self, job: Job) -> InMemoryJob:
        if self._known is None or self._known.state.job_id != job.name:
            raise ZeusBSOOperationOrderError(f"job {job.name} is not registered: call register_job first")
        return self._known

    def _running(self, job: Job, batch_size: int) -> TrialRecord:
        """The trial that `predict` has started, which must be of this size."""
        self._registered(job)
        running = [trial for trial in self._trials if trial.state is TrialState.RUNNING]
        if not running or running[-1].batch_size != batch_size:
            raise ZeusBSOOperationOrderError(f"batch size {batch_size} was not predicted: call predict before observe")
        return running[-1]

    def _report(self, job: Job, run: Run) -> None:
        """Tell the policy how a run that was measured has ended, and by which rule."""
        from bso_server.core.model import Report

        number = self._running(job, run.bs).trial_number
        cost_j, epochs = max(run.cost, _LEAST_COST_J), float(run.end_epoch or job.max_epochs)
        report = Report(time_s=run.time, energy_j=cost_j, epoch=epochs, metric=float(run.reached))
        # Its cost was bounded before an epoch that would have crossed the bound.
        is_bounded = run.outcome == "early_stopped"
        rule = StopRule(max_cost_j=0.0 if is_bounded else None, max_epochs=job.max_epochs)
        self._trials[number - 1], _ = self._registered(job).report(number, report, judged_by=rule)


def _trial_from(kept: Mapping[str, Any]) -> TrialRecord:
    from bso_server.core.model import TrialRecord

    members = {"state": TrialState, "origin": Origin, "end_reason": EndReason}
    # As version 0.1.0 names the number of reports, and the bound, which policy `zeus` does not have.
    values = {"report_count" if name == "reports" else name: value for name, value in kept.items() if name != "bound"}
    values |= {name: enum(values[name]) for name, enum in members.items() if values.get(name) is not None}
    return TrialRecord(**values)
