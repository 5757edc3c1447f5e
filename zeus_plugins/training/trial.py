"""A trial as its training knows it, and as a checkpoint keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from zeus_plugins.energy import Measurement
from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.protocol import (
    BatchSize,
    Identifier,
    NonNegativeFinite,
    PositiveInt,
    PowerProfile,
    RegistrationId,
    ReportResponse,
    StopRule,
    TrialId,
    WireMessage,
)

_BY_SERVER = {"trial_number", "registration_id", "lease_epoch"}


class TrialInfo(WireMessage):
    """A training's knowledge of its own trial; also the part of it that a checkpoint keeps.

    Attributes:
        job_id: The job.
        batch_size: Its global batch size.
        trial_number: Counts from 1 within the job; None while a trial that began without the server is not recorded.
        key: By which such a trial is recorded; None for one that the server has dispatched.
        registration_id: As in `TrialId`; likewise `lease_epoch`, which is None, too, in a run that has resumed while
            the server was away.
        reason: Why the server chose this batch size, in words; None from a Zeus server.
        stop_rule: When the trial is going to be stopped, as the server said last; None from a Zeus server.
        power_profile: What is known of the power limits at this batch size, by earlier trials or by this one; None
            where nothing is.
        time_s: Seconds measured in all closed windows since the trial began, earlier runs of a resumed trial included.
        energy_j: Joules measured in the same windows.
        energy_source: How that energy was measured; None before the first window was closed.
        epoch: Epochs trained as of the latest evaluation.
        metric: The latest finite validation metric.
        verdict: The latest answer of the server.
        advice: What the job's owner should change, where no batch size has reached the target; None elsewhere. No part
            of a checkpoint.
        unmeasured: Why what the trial costs is no longer known; None while it is.
    """

    job_id: Identifier
    batch_size: BatchSize
    trial_number: PositiveInt | None = None
    key: str | None = None
    registration_id: RegistrationId | None = None
    lease_epoch: PositiveInt | None = None
    reason: str | None = None
    stop_rule: StopRule | None = None
    power_profile: PowerProfile | None = None
    time_s: NonNegativeFinite = 0.0
    energy_j: NonNegativeFinite = 0.0
    energy_source: str | None = None
    epoch: float | None = None
    metric: float | None = None
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
        """The trial that a checkpoint holds, from what `TrialSession.state_dict` returned.

        Raises:
            ZeusBSOConfigError: It is something else.
        """
        try:
            return cls.model_validate(dict(state))
        except ValidationError as error:
            raise ZeusBSOConfigError(f"the checkpoint holds no trial that can be continued: {error}") from None

    @property
    def trial_id(self) -> TrialId | None:
        """The trial's name on the wire; None while the server has not recorded it."""
        if self.trial_number is None:
            return None
        return TrialId(**self.model_dump(include=set(TrialId.model_fields)))

    def known_as(self, trial_id: TrialId | None, **fields: Any) -> Self:
        """The trial as the server knows it, if it does, with other fields replaced, too."""
        told = dict.fromkeys(_BY_SERVER) if trial_id is None else trial_id.model_dump(include=_BY_SERVER)
        return self.model_copy(update=told | fields)

    @property
    def name(self) -> str:
        """The trial in words."""
        return "the offline trial" if self.trial_number is None else f"trial {self.trial_number}"

    @property
    def has_extended_server(self) -> bool:
        """Whether its server takes more than Zeus's does, such as heartbeats: Zeus's gives no reasons."""
        return self.reason is not None

    @property
    def is_over(self) -> bool:
        """Whether the server said stop."""
        return self.verdict is not None and self.verdict.stop_train

    def plus(self, measured: Measurement) -> Self:
        """The trial with the time and energy of one more window.

        Raises:
            ZeusBSOBadOperationError: The monitor gave numbers that cannot be.
        """
        if not all(math.isfinite(figure) and figure >= 0 for figure in (measured.time_s, measured.energy_j)):
            raise ZeusBSOBadOperationError(f"the monitor gave {measured.energy_j} J in {measured.time_s} s")
        # Every way that the totals were measured: a trial may resume on a machine that measures otherwise.
        sources = self.energy_source.split(" + ") if self.energy_source else []
        if measured.source not in sources:
            sources.append(measured.source)
        return self.model_copy(
            update={
                "time_s": self.time_s + measured.time_s,
                "energy_j": self.energy_j + measured.energy_j,
                "energy_source": " + ".join(sources)[:MAX_SOURCE_LENGTH],
            }
        )
