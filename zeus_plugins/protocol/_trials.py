"""Messages about one trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import StringConstraints, field_serializer, model_validator

from zeus_plugins.protocol._jobs import JobParams, TrialId
from zeus_plugins.protocol._values import (
    MAX_DETAIL_LENGTH,
    BatchSize,
    EndReason,
    Epochs,
    Finite,
    Fraction,
    Identifier,
    Joules,
    NonNegativeFinite,
    NonNegativeInt,
    Origin,
    PositiveInt,
    Seconds,
    Text,
    TrialState,
    Watched,
    Watts,
    WireMessage,
    epochs_in_words,
)

EndingState = Literal[TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED, TrialState.WITHDRAWN]
"""The states in which a training may end its own trial."""


class StopRule(WireMessage):
    """The rule that stops a trial, applied by the server and, while the server is away, by the training.

    Attributes:
        max_cost_j: Joules of cost above which the trial is stopped, even at its target. None: no limit.
        max_epochs: Epochs after which it is stopped.
        confirmed: Number of its latest evaluations that reached the target, in a row.
        confirmed_epoch: Epoch of the last of them; None for none.
    """

    max_cost_j: NonNegativeFinite | None = None
    max_epochs: PositiveInt
    confirmed: NonNegativeInt = 0
    confirmed_epoch: Epochs | None = None

    def confirmed_as(self, other: StopRule) -> StopRule:
        """Return this rule with the count of confirmed evaluations of another rule."""
        return self.model_copy(update={"confirmed": other.confirmed, "confirmed_epoch": other.confirmed_epoch})

    def counting(self, goal: JobParams, *, metric: float, epochs: float) -> StopRule:
        """Return the rule after an evaluation; an epoch that a resumed training repeats counts once."""
        if not goal.is_reached_by(metric):
            return self.model_copy(update={"confirmed": 0, "confirmed_epoch": None}) if self.confirmed else self
        if self.confirmed_epoch is not None and epochs <= self.confirmed_epoch:
            return self
        return self.model_copy(update={"confirmed": self.confirmed + 1, "confirmed_epoch": epochs})

    def judge(
        self, goal: JobParams, *, metric: float, epochs: float, cost_j: float | None, because: str | None = None
    ) -> Verdict:
        """Decide whether a trial continues.

        A trial stops above `max_cost_j`, once `confirm` evaluations in a row reach the target, or after `max_epochs`.
        The target counts only within the cost bound. The verdict's rule includes this evaluation in its count.

        Args:
            goal: The job, with the target, `confirm` and `max_epochs`.
            metric: The trial's latest validation metric.
            epochs: Epochs trained so far.
            cost_j: The trial's cost so far, joules; None if unknown, so that the cost bound does not apply.
            because: The reason for `max_cost_j` or, if that is None, for `max_epochs`.
        """
        spent = "at an unknown cost" if cost_j is None else f"{cost_j:.4g} J"
        after, measured = f"after {epochs_in_words(epochs)}", _beside_target(goal, metric)
        rule = self.counting(goal, metric=metric, epochs=epochs)
        if goal.confirm > 1 and rule.confirmed:
            measured += f", reached in {min(rule.confirmed, goal.confirm)} of {goal.confirm} evaluations in a row"
        if self.max_cost_j is not None and cost_j is not None and cost_j > self.max_cost_j:
            bound = f"{self.max_cost_j:.4g} J" if because is None else f"{because}, {self.max_cost_j:.4g} J"
            state, reason = TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED
            message = f"stopped {after}: {spent} spent, more than {bound}; {measured}"
        elif rule.confirmed >= goal.confirm:
            state, reason = TrialState.COMPLETED, EndReason.TARGET_REACHED
            message = f"target reached {after}: {measured}"
        elif goal.target_metric is None and epochs >= goal.max_epochs:
            state, reason = TrialState.COMPLETED, EndReason.NO_TARGET
            message = f"completed {after}, to set the target: {measured}"
        elif epochs >= goal.max_epochs:
            state, reason = TrialState.EXHAUSTED, EndReason.MAX_EPOCHS_REACHED
            message = f"stopped {after}, all that max_epochs allows: {measured}"
        elif epochs >= self.max_epochs:
            state, reason = TrialState.EARLY_STOPPED, EndReason.EPOCH_BOUND_REACHED
            message = f"stopped {after}: {measured}" + (f"; {because}" if because else "")
        else:
            state, reason = TrialState.RUNNING, EndReason.KEEP_TRAINING
            message = f"continue {after}: {measured}; {spent}" + ("" if cost_j is None else " spent")
            if because is not None and self.max_cost_j is None:
                message += f"; it has {epochs_in_words(self.max_epochs)} ({because})"
        return Verdict(state, reason, message, rule)


def _beside_target(goal: JobParams, metric: float) -> str:
    """Return the metric and the target in words, with as many digits as show that they differ."""
    if goal.target_metric is None:
        return f"{goal.monitor} {metric:.4g}, no target yet"
    target = f"{goal.target_metric:g}"
    texts = (f"{metric:.{digits}g}" for digits in range(4, 18))
    shown = next((text for text in texts if text != target or metric == goal.target_metric), target)
    return f"{goal.monitor} {shown}, target {target}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a trial after an evaluation: its new `state` with a `message`, and the `rule` that applies."""

    state: TrialState
    reason: EndReason
    message: str
    rule: StopRule

    @property
    def stop(self) -> bool:
        """True if the training should end."""
        return self.state is not TrialState.RUNNING

    @property
    def converged(self) -> bool:
        """True if the target was reached within the cost bound, or if a run that sets the target has ended."""
        return self.state is TrialState.COMPLETED


class TrialDispatch(TrialId):
    """Answer of ``GET /jobs/batch_size`` and of ``POST /trials``.

    Attributes:
        origin: Why the trial was dispatched; None, here and below, from a Zeus server.
        reason: The origin in words.
        stop_rule: When the trial will be stopped, as far as the server knows.
        is_first: True if no run of the job has counted yet. If the first evaluation of such a run reaches the target,
            our client goes on to the second one, which shows whether the direction of the metric is right.
        scaling: The job's `scaling`, for which the trial counts.
    """

    origin: Origin | None = None
    reason: str | None = None
    stop_rule: StopRule | None = None
    is_first: bool = False
    scaling: Text | None = None


class OfflineTrial(WireMessage):
    """Body of ``POST /trials``: a trial whose batch size the training chose, to be recorded.

    Attributes:
        job_id: The job.
        batch_size: One of its batch sizes.
        continues: Number of the trial whose model this trial trains on, because it missed the target. None: the
            trial began while the server was away.
    """

    job_id: Identifier
    batch_size: BatchSize
    continues: PositiveInt | None = None


class PowerLimitChoice(WireMessage):
    """The power limit of a training, in its reports and its ending.

    Attributes:
        power_limit_w: The limit that it sets, watts of each GPU; None if it sets none. Goes with `power_limits`.
        power_limits: Number of limits whose cost it knows; None, as from a Zeus client, keeps what an earlier message
            said.
    """

    power_limit_w: Watts | None = None
    power_limits: PositiveInt | None = None


class Ending(PowerLimitChoice):
    """The end of a training before the server's verdict.

    Attributes:
        outcome: ``failed`` (a crash, and every ending of a Zeus client: the size is tried again, up to a limit),
            ``infeasible`` (out of memory: neither this size nor a larger one is tried again on this hardware),
            ``suspended`` (preempted: the trial may resume), or ``withdrawn`` (the training could not run as configured:
            the trial counts neither as a try nor as a crash of the size).
        refused_size: Whether a ``withdrawn`` training could not run because of its batch size. Unless it is the job's
            default, this size alone is not tried again on this hardware.
        ended_early: Whether a ``failed`` training ended by a rule of its own, such as early stopping or a limit on its
            steps, instead of an error.
        detail: A description in words.
    """

    outcome: EndingState = TrialState.FAILED
    refused_size: bool = False
    ended_early: bool = False
    detail: Annotated[str, StringConstraints(max_length=MAX_DETAIL_LENGTH, pattern=r"^[^\x00]*$")] | None = None


class TrialEnd(Ending, TrialId):
    """Body of ``PATCH /trials``: a training has ended before the server's verdict."""


class Heartbeat(TrialId):
    """Body of ``PATCH /trials/heartbeat``.

    Attributes:
        regular: Whether more heartbeats follow at the interval of the answer. If so, the trial gets a short
            lease: it is soon abandoned when heartbeats stop.
        resumes: Whether a training that resumes takes the trial over from the run with this `lease_epoch`. The answer
            holds the new epoch.
    """

    regular: bool = True
    resumes: bool = False

    @model_validator(mode="after")
    def _takes_over_from_a_run(self) -> Self:
        if self.resumes and self.lease_epoch is None:
            raise ValueError("resumes goes with lease_epoch, so that a take-over that arrives twice is one")
        return self


class HeartbeatResponse(WireMessage):
    """Answer of ``PATCH /trials/heartbeat``.

    Attributes:
        state: The trial's state. After its end, no more heartbeats are necessary.
        lease_s: Seconds without a message after which the trial is abandoned.
        interval_s: Seconds until the next heartbeat is due.
        lease_epoch: The trial's `lease_epoch`, as in `TrialId`.
        time_s: Seconds from the trial's start to its last report; None, here and below, before the first one.
        energy_j: Joules from the start to the last report.
        epochs: Epochs from the start to the last report.
    """

    state: TrialState
    lease_s: float
    interval_s: float
    lease_epoch: PositiveInt
    time_s: float | None = None
    energy_j: float | None = None
    epochs: float | None = None


class Evaluation(PowerLimitChoice):
    """The totals of a trial at an evaluation.

    Attributes:
        time: Seconds since the trial began.
        energy: Joules since the trial began, over all its GPUs.
        metric: The validation metric.
        current_epoch: Epochs trained so far, counting from 1; fractional when validating within an epoch.
        energy_source: How the energy was measured, e.g. ``"nvml"`` or ``"estimate: 65 W stated"``.
        waited_share: Share of the time in which the training could run but waited for a core that other work used; None
            if unknown.
        startup_s: Part of `time` that the first steps took beyond later steps, such as compilation; None if unknown.
            The first evaluation's value counts.
        watched: Last values of the watched metrics; None, as from a Zeus client, keeps those of the report before.
        judged_by: The rule by which the training has judged this evaluation while the server was away; the server then
            applies the same rule. None: the server chooses the rule.
        rank: Rank of the process that reports, if every rank of the training may report; None if one reports for all.
    """

    time: Seconds
    energy: Joules
    metric: Finite
    current_epoch: Epochs
    energy_source: Text | None = None
    waited_share: Fraction | None = None
    startup_s: NonNegativeFinite | None = None
    judged_by: StopRule | None = None
    watched: Watched | None = None
    rank: NonNegativeInt | None = None

    @field_serializer("current_epoch")
    def _whole_epochs_as_integers(self, epoch: float) -> int | float:
        return int(epoch) if epoch.is_integer() else epoch


class TrainingResult(Evaluation, TrialId):
    """Body of ``POST /report``: an evaluation of a trial."""

    @property
    def is_of_one_rank(self) -> bool:
        """True if other ranks may report the same evaluation.

        Every rank of Zeus's client reports, without our fields, whereas our client sends all fields, even None.
        """
        return self.rank is not None or self.model_fields_set.isdisjoint(("energy_source", "judged_by"))


class ReportResponse(WireMessage):
    """Answer of ``POST /report``.

    Attributes:
        stop_train: Whether the training should end now.
        converged: Whether it reached the target metric within the cost bound.
        message: The verdict in words, with numbers.
        reason: The reason for the verdict; None from a Zeus server.
        stop_rule: When the trial will be stopped, as far as the server knows; None from a Zeus server.
    """

    stop_train: bool
    converged: bool
    message: str
    reason: EndReason | None = None
    stop_rule: StopRule | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """Return a verdict as the answer to its report."""
        return cls(
            stop_train=verdict.stop,
            converged=verdict.converged,
            message=verdict.message,
            reason=verdict.reason,
            stop_rule=None if verdict.stop else verdict.rule,
        )
