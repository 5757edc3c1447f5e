"""The facts of a trial that its training knows, and that a checkpoint keeps."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from zeus_plugins.energy import Measurement
from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.protocol import (
    BatchSize,
    EndReason,
    Identifier,
    NonNegativeFinite,
    PositiveInt,
    PowerLimitChoice,
    RegistrationId,
    ReportResponse,
    StopRule,
    TrialId,
    Watched,
    busy_remark,
    is_time_alone,
)

_BY_SERVER = {"trial_number", "registration_id", "lease_epoch", "dispatch_id"}


class TrialInfo(PowerLimitChoice):
    """A trial as its training knows it; the content of a checkpoint. `str` returns its outcome in one line.

    Attributes:
        job_id: The job.
        batch_size: Global batch size of the trial.
        trial_number: Number within the job, from 1; None until the server has recorded a trial that began without it.
        key: Key by which the server records such a trial; None for a trial that the server dispatched.
        continues: Number of the trial whose run this one finishes, or None.
        registration_id: As in `TrialId`.
        lease_epoch: As in `TrialId`; also None after resuming without the server.
        dispatch_id: As in `TrialId`.
        reason: The server's reason for the batch size, in words; None from a Zeus server.
        stop_rule: Rule by which the server stops the trial, as last received; None from a Zeus server.
        time_s: Seconds in all closed windows since the trial began, including earlier runs of a resumed trial.
        energy_j: Joules in the same windows.
        energy_source: Source of the energy measurement; None before the first window closes.
        cost_j: Cost of the same windows, joules; None if unknown; not in checkpoints.
        waited_s: Seconds of `time_s` in which the training could run but waited for a core; None if unknown.
        startup_s: Part of `time_s` that the first steps took beyond later ones; None if unknown.
        epoch: Epochs trained at the latest evaluation.
        metric: Latest finite validation metric.
        watched: Latest values of the watched metrics, by name; None if there are none.
        verdict: Latest verdict.
        advice: Advice to the job's owner if no batch size has reached the target, or None; not in checkpoints.
        unmeasured: Why the trial's cost is unknown, or None.
    """

    job_id: Identifier
    batch_size: BatchSize
    trial_number: PositiveInt | None = None
    key: str | None = None
    continues: PositiveInt | None = None
    registration_id: RegistrationId | None = None
    lease_epoch: PositiveInt | None = None
    dispatch_id: str | None = None
    reason: str | None = None
    stop_rule: StopRule | None = None
    time_s: NonNegativeFinite = 0.0
    energy_j: NonNegativeFinite = 0.0
    energy_source: str | None = None
    cost_j: float | None = Field(default=None, exclude=True)
    waited_s: NonNegativeFinite | None = None
    startup_s: NonNegativeFinite | None = None
    epoch: float | None = None
    metric: float | None = None
    watched: Watched | None = None
    verdict: ReportResponse | None = None
    advice: str | None = Field(default=None, exclude=True)
    unmeasured: str | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if self.trial_number is None and self.key is None:
            raise ValueError("a trial has a trial_number, or a key by which it is recorded")
        return self

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Return the trial of a checkpoint; raise `ZeusBSOConfigError` if `state` describes none."""
        try:
            return cls.model_validate(dict(state))
        except ValidationError as error:
            raise ZeusBSOConfigError(f"the checkpoint holds no trial that can be continued: {error}") from None

    @property
    def trial_id(self) -> TrialId | None:
        """The trial's identity in requests; None until the server has recorded the trial."""
        if self.trial_number is None:
            return None
        return TrialId(**self.model_dump(include=set(TrialId.model_fields)))

    def known_as(self, trial_id: TrialId | None, **fields: Any) -> Self:
        """Return a copy with the identity that the server gave the trial, if any, and with `fields` replaced."""
        identity = dict.fromkeys(_BY_SERVER) if trial_id is None else trial_id.model_dump(include=_BY_SERVER)
        return self.model_copy(update=identity | fields)

    @property
    def name(self) -> str:
        """The trial in words."""
        return "the offline trial" if self.trial_number is None else f"trial {self.trial_number}"

    @property
    def has_extended_server(self) -> bool:
        """Whether the server supports more than Zeus's, such as heartbeats; Zeus's gives no reasons."""
        return self.reason is not None

    @property
    def is_over(self) -> bool:
        """Whether the verdict says stop."""
        return self.verdict is not None and self.verdict.stop_train

    @property
    def waited_share(self) -> float | None:
        """The share of its time in which the training waited for a core, to a hundredth; None if unknown."""
        if self.waited_s is None or self.time_s <= 0:
            return None
        return round(min(self.waited_s / self.time_s, 1.0), 2)

    @property
    def busy_remark(self) -> str | None:
        """A remark on a training that a busy machine has slowed; None for another.

        The job's first trial also names a remedy, if torch uses several threads.
        """
        remark, torch = busy_remark(self.waited_share), sys.modules.get("torch")
        if remark is None or self.trial_number != 1 or torch is None or torch.get_num_threads() == 1:
            return remark
        return f"{remark}; set OMP_NUM_THREADS=1 or torch.set_num_threads(1), or run it at another hour"

    @property
    def converged(self) -> bool:
        """True if the verdict says stop because the target was reached."""
        return self.verdict is not None and self.verdict.stop_train and self.verdict.converged

    @property
    def used_all_epochs(self) -> bool:
        """True if the verdict says stop because the trial has trained all epochs of its job without the target."""
        return self.verdict is not None and self.verdict.reason is EndReason.MAX_EPOCHS_REACHED

    @property
    def epochs(self) -> float | None:
        """Epochs trained at the latest evaluation; None before the first."""
        return self.epoch

    @property
    def outcome(self) -> str:
        """The reason why the training ended, in words."""
        return "no evaluation was reported" if self.verdict is None else self.verdict.message

    @property
    def spent(self) -> str:
        """The time and the energy in words; the time alone where the energy is nothing else."""
        if is_time_alone(self.energy_source):
            return f"{self.time_s:.4g} s (energy: {self.energy_source} × time)"
        source = f" ({self.energy_source})" if self.energy_source else ""
        return f"{self.time_s:.4g} s and {self.energy_j:.4g} J{source}"

    def __str__(self) -> str:
        cost = "" if self.cost_j is None else f", a cost of {self.cost_j:.4g} J"
        return f"{self.outcome}. Batch size {self.batch_size} took {self.spent}{cost}"

    def plus(self, measured: Measurement, waited_s: float | None = None) -> Self:
        """Return the trial with one more window; raise `ZeusBSOBadOperationError` for numbers that cannot be.

        `waited_s` is the time in this window in which the training waited for a core; None if unknown.
        """
        if not all(math.isfinite(figure) and figure >= 0 for figure in (measured.time_s, measured.energy_j)):
            raise ZeusBSOBadOperationError(f"the monitor gave {measured.energy_j} J in {measured.time_s} s")
        # Keep all sources: a trial may resume on a machine that measures in another way.
        sources = self.energy_source.split(" + ") if self.energy_source else []
        if measured.source not in sources:
            sources.append(measured.source)
        return self.model_copy(
            update={
                "time_s": self.time_s + measured.time_s,
                "energy_j": self.energy_j + measured.energy_j,
                "energy_source": " + ".join(sources)[:MAX_SOURCE_LENGTH],
                "waited_s": self.waited_s if waited_s is None else (self.waited_s or 0.0) + waited_s,
            }
        )
