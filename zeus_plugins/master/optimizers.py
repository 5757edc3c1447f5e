"""The objects that choose a master's batch sizes: their interface, which is Zeus's, and the two kinds that we have.

`ServerOptimizer` asks the batch size optimization server, `PolicyOptimizer` the server's policies in this process.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import TypeAdapter

from zeus_plugins.client.outbox import Outbox, OutboxHeader, default_outbox
from zeus_plugins.client.port import ServerPort
from zeus_plugins.client.reporter import TrialReporter
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSORuntimeError
from zeus_plugins.master.history import Run, run_of_cost
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import (
    GP_VOI,
    LEAST_TIME_S,
    CreatedJob,
    Ending,
    Evaluation,
    GpuConfig,
    JobSpec,
    JobSpecFromClient,
    StopRule,
    TrialDispatch,
    TrialId,
    TrialState,
)

if TYPE_CHECKING:
    from bso_server.core.job import InMemoryJob
    from bso_server.core.model import TrialRecord


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


class ServerOptimizer:
    """Each run of the script is a trial on the server, which ends as the run did.

    While a run goes on, its trial is kept alive by heartbeats; results wait in the outbox while the server is away.

    Args:
        client: Talks to the server. `zeus_plugins.client.client_from_environment` makes one. It is not closed here.
        gpus: The accelerators that the job runs on.
        eta_knob: η of the cost; the same as the master's.
        beta_knob: β of the cost bound; the same as the master's.
        outbox: Directory in which results wait while the server is away; by default in the user's directory for state.
        options: More fields of `JobSpec`, such as ``num_pruning_rounds``.
    """

    def __init__(
        self,
        client: ServerPort,
        gpus: GpuConfig,
        *,
        eta_knob: float = 0.5,
        beta_knob: float | None = 2.0,
        outbox: Outbox | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.eta_knob = eta_knob
        self.beta_knob = beta_knob
        self._client = client
        self._gpus = gpus
        self._outbox = outbox or default_outbox()
        self._options = dict(options or {})
        # Trials are asked for by keys that a resumed master makes again: a trial that was asked for, but not kept, is
        # found by its key.
        self._key = secrets.token_hex(16)
        self._asked = 0
        self._registration: CreatedJob | None = None
        self._trial: TrialDispatch | None = None
        self._reporter: TrialReporter | None = None

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """Register the job, under its name, on this hardware.

        Raises:
            ZeusBSOConfigError: The server refuses the job or the token; or it knows the job otherwise.
            ZeusBSORuntimeError: The server cannot be reached, or fails.
        """
        spec = JobSpec(
            **{
                "job_id": job.name,
                "job_id_prefix": job.name,
                "batch_sizes": tuple(batch_sizes),
                "default_batch_size": job.default_bs,
                "eta_knob": self.eta_knob,
                "beta_knob": self.beta_knob,
                "target_metric": job.target_metric,
                "higher_is_better_metric": job.higher_is_better_metric,
                "max_epochs": job.max_epochs,
                **self._options,
            }
        )
        self._registration = self._client.register(JobSpecFromClient.of(spec, self._gpus))
        if self._trial is not None:
            self._open_line(self._registration, self._trial)

    def predict(self, job: Job) -> int:
        """Start a trial; its batch size.

        Raises:
            ZeusBSOOperationOrderError: The job is not registered.
            ZeusBSORuntimeError: The server cannot be reached, fails, or has no batch size that works.
        """
        registration = self._registered(job)
        self._trial = self._client.request_trial(registration.job_id, f"{self._key}-{self._asked}")
        self._asked += 1
        self._open_line(registration, self._trial)
        return self._trial.batch_size

    def observe(self, job: Job, batch_size: int, cost: float, converged: bool | None = None) -> None:
        """End the trial by its cost alone, joules: told to the server as that energy at maximum power."""
        time_s = cost / self._registered(job).max_power
        self._report_run(job, run_of_cost(job, batch_size, cost, time_s=time_s, reached=bool(converged)))

    def observe_run(self, job: Job, run: Run) -> None:
        """End the trial as the run ended."""
        if run.was_measured:
            self._report_run(job, run)
        else:
            self._registered(job)
            self._line().end(Ending.model_validate({"outcome": run.outcome, "detail": run.reason}))
            self._reporter = self._trial = None

    def interrupt(self) -> None:
        """Suspend the trial, as the master ends: its run goes on, or is done again, when the master is resumed."""
        if self._reporter is not None:
            self._reporter.end(Ending(outcome=TrialState.SUSPENDED, detail="the master was interrupted"))
            self._reporter = None

    def state_dict(self) -> dict[str, Any]:
        """The key and number of trials asked for, and the one that is under way."""
        trial = None if self._trial is None else self._trial.model_dump(mode="json")
        return {"key": self._key, "asked": self._asked, "trial": trial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, before `register_job`."""
        self._key, self._asked = state["key"], state["asked"]
        self._trial = None if state["trial"] is None else TrialDispatch.model_validate(state["trial"])

    def _registered(self, job: Job) -> CreatedJob:
        if self._registration is None or self._registration.job_id != job.name:
            raise ZeusBSOOperationOrderError(f"job {job.name} is not registered: call register_job first")
        return self._registration

    def _open_line(self, registration: CreatedJob, trial: TrialDispatch) -> None:
        self._reporter = TrialReporter(
            self._client,
            self._outbox,
            OutboxHeader(
                server_url=self._client.server_url,
                registration=registration,
                batch_size=trial.batch_size,
                trial=TrialId(**trial.model_dump()),
            ),
            trial.stop_rule or StopRule(max_epochs=registration.max_epochs),
            takes_heartbeats=trial.reason is not None,
        )
        self._reporter.start()

    def _line(self) -> TrialReporter:
        if self._reporter is None:
            raise ZeusBSOOperationOrderError("there is no trial: call predict before observe")
        return self._reporter

    def _report_run(self, job: Job, run: Run) -> None:
        """Report the end of a run, with the rule by which it was ended."""
        registration, line = self._registered(job), self._line()
        if self._trial is None or self._trial.batch_size != run.bs:
            raise ZeusBSOConfigError(f"the trial under way is not one of batch size {run.bs}")
        epochs = run.end_epoch or job.max_epochs
        cost_j = registration.cost_j(time_s=run.time, energy_j=run.energy)
        max_cost_j: float | None = None
        if not run.reached and (cost_j > run.cost_ub or epochs < registration.max_epochs):
            # It was stopped before an epoch that would have crossed the bound, which its cost may not have reached.
            max_cost_j = min(run.cost_ub, math.nextafter(cost_j, 0))
        verdict = line.report_evaluation(
            Evaluation(
                time=max(run.time, LEAST_TIME_S),
                energy=run.energy,
                metric=_metric_of(registration, run),
                current_epoch=max(epochs, 1),
                energy_source=run.energy_source,
                judged_by=StopRule(max_cost_j=max_cost_j, max_epochs=registration.max_epochs),
            )
        )
        line.end(None if verdict.stop_train else Ending(detail="the run ended before the server said so"))
        self._reporter = self._trial = None


def _metric_of(job: CreatedJob, run: Run) -> float:
    """The metric to report: the script's, or one that says as much as `run.reached` does."""
    if run.metric is not None and job.is_reached_by(run.metric) == run.reached:
        return run.metric
    if run.reached:
        return job.target_metric
    return math.nextafter(job.target_metric, -math.inf if job.higher_is_better_metric else math.inf)


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
            import bso_server.core.policy
        except ModuleNotFoundError as error:
            raise ZeusBSOConfigError(
                f"the policies of the server need {error.name}, which is not installed: pip install "
                "'zeus-plugins[server]'"
            ) from None
        self._core = bso_server.core.job
        if policy is not None and (missing := bso_server.core.policy.find(policy).missing):
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
        registration = CreatedJob.model_construct(
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
            trial = known.begin_trial(np.random.default_rng((self._seed, len(self._trials) + 1)))
        except NoSurvivorError as error:
            raise ZeusBSORuntimeError(str(error)) from None
        self._trials.append(trial)
        return trial.batch_size

    def observe(self, job: Job, batch_size: int, cost: float, converged: bool | None = None) -> None:
        """Learn what the run has cost, joules; one that has not reached the target (False, None) is censored there.

        The epochs that it took are unknown here: they count as `max_epochs`. `observe_run` knows better.
        """
        self._report_run(job, run_of_cost(job, batch_size, cost, time_s=0.0, reached=bool(converged)))

    def observe_run(self, job: Job, run: Run) -> None:
        """Learn of a run; one without a result has its size tried again, up to a limit, or excluded."""
        if run.was_measured:
            self._report_run(job, run)
            return
        ending = Ending.model_validate({"outcome": run.outcome})
        number = self._running(job, run.bs).trial_number
        self._trials[number - 1] = self._registered(job).end_trial(number, ending, retries=_CRASH_RETRIES)

    def state_dict(self) -> dict[str, Any]:
        """The policy, all trials, and the sizes that survived the exploration."""
        survivors = self._survivors if self._known is None else self._known.state.survivors
        trials = [{name: value for name, value in asdict(each).items() if value is not None} for each in self._trials]
        return {"policy": self._policy, "trials": trials, "survivors": survivors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Raises:
            ZeusBSOConfigError: Another policy was asked for than the job was begun with.
        """
        from bso_server.core.model import TrialRecord

        begun_with = state["policy"]
        if self._asked_policy not in (None, begun_with):
            raise ZeusBSOConfigError(
                f"the job was begun with policy {begun_with}, not {self._asked_policy}: its trials were chosen by "
                "that one. Change it back, or start anew"
            )
        self._policy = begun_with
        self._trials = TypeAdapter(list[TrialRecord]).validate_python(state["trials"])
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

    def _report_run(self, job: Job, run: Run) -> None:
        """Tell the policy how a run that was measured has ended, and by which rule."""
        from bso_server.core.model import Report

        number = self._running(job, run.bs).trial_number
        cost_j, epochs = max(run.cost, _LEAST_COST_J), float(run.end_epoch or job.max_epochs)
        report = Report(time_s=run.time, energy_j=cost_j, epoch=epochs, metric=float(run.reached))
        # Its cost was bounded before an epoch that would have crossed the bound.
        is_bounded = run.outcome == "early_stopped"
        rule = StopRule(max_cost_j=0.0 if is_bounded else None, max_epochs=job.max_epochs)
        self._trials[number - 1], _ = self._registered(job).judge(number, report, judged_by=rule)
