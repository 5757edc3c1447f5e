"""The optimizer of a master, which asks the server for the batch size of each run."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any

from zeus_plugins.client.delivery import registered_as
from zeus_plugins.client.outbox import OutboxHeader, default_outbox
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.client.reporter import TrialReporter
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSOOperationOrderError
from zeus_plugins.master.history import Run
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import (
    LEAST_TIME_S,
    CreatedJob,
    Ending,
    Evaluation,
    GpuConfig,
    JobSpecFromClient,
    SavingsView,
    StopRule,
    TrialDispatch,
    TrialId,
    TrialState,
)
from zeus_plugins.training.defaults import as_job

_logger = logging.getLogger("zeus_plugins")


class ServerOptimizer:
    """Makes each run of the script a trial on the server.

    Heartbeats renew the trial's lease during the run. Results wait in the outbox while the server is away.

    Args:
        client: Client of the server, as from `zeus_plugins.client.client_from_environment`; the caller closes it.
        gpus: The accelerators that the job runs on.
        options: Further fields of `JobSpec`, such as ``num_pruning_rounds``.
    """

    def __init__(self, client: ServerPort, gpus: GpuConfig, *, options: Mapping[str, Any] | None = None) -> None:
        self._client = client
        self._gpus = gpus
        self._outbox = default_outbox()
        self._options = dict(options or {})
        # A resumed master repeats the same keys, so that the server can resend a trial that did not arrive.
        self._key = secrets.token_hex(16)
        self._asked = 0
        self._registration: CreatedJob | None = None
        self._trial: TrialDispatch | None = None
        self._reporter: TrialReporter | None = None

    def register_job(
        self, job: Job, batch_sizes: list[int], *, eta_knob: float = 0.5, beta_knob: float | None = 2.0
    ) -> None:
        """Register the job under its name, with the master's η and β.

        Raises:
            ZeusBSOConfigError: The server refuses the job or the token, or has the job with other settings.
            ZeusBSORuntimeError: The server is unreachable, or fails.
        """
        spec = as_job(
            {
                "job_id": job.name,
                "job_id_prefix": job.name,
                "batch_sizes": tuple(batch_sizes),
                "default_batch_size": job.default_bs,
                "eta_knob": eta_knob,
                "beta_knob": beta_knob,
                "target_metric": job.target_metric,
                "higher_is_better_metric": job.higher_is_better_metric,
                "max_epochs": job.max_epochs,
                **self._options,
            }
        )
        asked = JobSpecFromClient.of(spec, self._gpus).model_copy(update={"scaling": f"master {job.lr_scaling}"})
        self._registration = registered_as(self._client, asked, {"scaling"})
        if self._registration.scaling != asked.scaling:  # the only term that revises a master's job
            self._registration = registered_as(self._client, asked, (), revises=True)
        if self._trial is not None:
            self._open_line(self._registration, self._trial)

    def predict(self, job: Job) -> int:
        """Start a trial, and return its batch size.

        Raises:
            ZeusBSOOperationOrderError: The job is not registered.
            ZeusBSORuntimeError: The server is unreachable, fails, or has no batch size left.
        """
        registration = self._registered(job)
        self._trial = self._client.request_trial(registration.job_id, f"{self._key}-{self._asked}")
        self._asked += 1
        self._open_line(registration, self._trial)
        return self._trial.batch_size

    def observe_run(self, job: Job, run: Run) -> None:
        """End the trial with the run's outcome; after a crash of the master, this may be the second call for a run."""
        if run.was_measured:
            self._report_run(job, run)
        else:
            self._registered(job)
            self._line().end(Ending.model_validate({"outcome": run.outcome, "detail": run.reason}))
            self._reporter = self._trial = None

    def interrupt(self) -> None:
        """Suspend the trial when the master ends, so that a resumed master can continue it."""
        if self._reporter is not None:
            self._reporter.end(Ending(outcome=TrialState.SUSPENDED, detail="the master was interrupted"))
            self._reporter = None

    def savings(self) -> SavingsView | None:
        """Return the savings of all runs of the job on the server; None if the server does not answer."""
        if self._registration is None:
            return None
        try:
            with self._client.with_retries(NO_RETRIES) as client:
                return client.show_job(self._registration.job_id, limit=1).savings
        except ZeusBSOError as error:
            _logger.debug("the server does not show the job: %s", error)
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the key of the requests, the number of requested trials, and the running trial."""
        trial = None if self._trial is None else self._trial.model_dump(mode="json")
        return {"key": self._key, "asked": self._asked, "trial": trial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, before `register_job`."""
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
        """Report the end of a run, with the rule that ended it."""
        registration, line = self._registered(job), self._line()
        if self._trial is None or self._trial.batch_size != run.bs:
            raise ZeusBSOConfigError(f"the trial under way is not one of batch size {run.bs}")
        epochs = run.end_epoch or job.max_epochs
        cost_j = registration.cost_j(time_s=run.time, energy_j=run.energy)
        max_cost_j: float | None = None
        if not run.reached and (cost_j > run.cost_ub or epochs < registration.max_epochs):
            # The run stopped before an epoch that would have crossed the bound, so its cost may be below the bound.
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
    """Return the script's metric if it agrees with `run.reached`, else a value at the target or just short of it."""
    if run.metric is not None and job.is_reached_by(run.metric) == run.reached:
        return run.metric
    target = job.target_metric or 0.0  # a master's job always has a target
    if run.reached:
        return target
    return math.nextafter(target, -math.inf if job.higher_is_better_metric else math.inf)
