"""Batch sizes from the batch size optimization server, elsewhere or in this process."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from zeus_plugins.client.outbox import Outbox, OutboxHeader, default_outbox
from zeus_plugins.client.port import ServerPort
from zeus_plugins.client.reporter import TrialReporter
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.master.history import Run, run_of_cost
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import (
    LEAST_TIME_S,
    Ending,
    Evaluation,
    GpuConfig,
    JobRegistration,
    JobSpec,
    StopRule,
    TrialDispatch,
    TrialId,
    TrialState,
)


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
        self._registration: JobRegistration | None = None
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
        self._registration = self._client.register(JobRegistration.of(spec, self._gpus))
        if self._trial is not None:
            self._open_line(self._registration, self._trial)

    def predict(self, job: Job) -> int:
        """Start a trial; its batch size.

        Raises:
            ZeusBSOOperationOrderError: The job is not registered.
            ZeusBSORuntimeError: The server cannot be reached, fails, or has no batch size that works.
        """
        registration = self._registered(job)
        self._trial = self._client.suggest(registration.job_id or job.name, f"{self._key}-{self._asked}")
        self._asked += 1
        self._open_line(registration, self._trial)
        return self._trial.batch_size

    def observe(self, job: Job, batch_size: int, cost: float, converged: bool | None = None) -> None:
        """End the trial by its cost alone, joules: told to the server as that energy at maximum power."""
        time_s = cost / self._registered(job).max_power
        self._report(job, run_of_cost(job, batch_size, cost, time_s=time_s, reached=bool(converged)))

    def observe_run(self, job: Job, run: Run) -> None:
        """End the trial as the run ended."""
        if run.was_measured:
            self._report(job, run)
        else:
            self._registered(job)
            self._line().end(Ending(outcome=_ENDINGS[run.outcome], detail=run.reason))
            self._reporter = self._trial = None

    def interrupt(self) -> None:
        """Suspend the trial: its run goes on, or is done again, when the master is resumed."""
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

    def _registered(self, job: Job) -> JobRegistration:
        if self._registration is None or self._registration.job_id != job.name:
            raise ZeusBSOOperationOrderError(f"job {job.name} is not registered: call register_job first")
        return self._registration

    def _open_line(self, registration: JobRegistration, trial: TrialDispatch) -> None:
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

    def _report(self, job: Job, run: Run) -> None:
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
        verdict = line.report(
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


_ENDINGS: Mapping[str, Literal[TrialState.FAILED, TrialState.INFEASIBLE]] = {
    "failed": TrialState.FAILED,
    "infeasible": TrialState.INFEASIBLE,
}


def _metric_of(job: JobRegistration, run: Run) -> float:
    """The metric to report: the script's, or one that says as much as `run.reached` does."""
    if run.metric is not None and job.is_reached_by(run.metric) == run.reached:
        return run.metric
    if run.reached:
        return job.target_metric
    return math.nextafter(job.target_metric, -math.inf if job.higher_is_better_metric else math.inf)
