"""The cost of a training's steps under each power limit."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, FailFast, Field, ValidationInfo, field_validator

from zeus_plugins.protocol._jobs import GpuConfig, TrialId
from zeus_plugins.protocol._values import MAX_POWER_LIMITS, Joules, PositiveInt, Seconds, Text, Watts, WireMessage


class PowerLimitSample(WireMessage):
    """One measurement window under one power limit.

    Attributes:
        limit_w: The power limit of each GPU, watts.
        steps: Steps measured.
        time_s: Their duration, seconds.
        energy_j: Their energy over all GPUs, joules.
        source: How the energy was obtained, as `zeus_plugins.energy.Measurement.source`.
    """

    limit_w: Watts
    steps: PositiveInt
    time_s: Seconds
    energy_j: Joules
    source: Text = ""

    @property
    def time_per_step_s(self) -> float:
        """Seconds of one step."""
        return self.time_s / self.steps

    @property
    def energy_per_step_j(self) -> float:
        """Joules of one step, over all GPUs."""
        return self.energy_j / self.steps

    @property
    def average_power_w(self) -> float:
        """Mean power over all GPUs, watts."""
        return self.energy_j / self.time_s


def _ascending_with_one_for_each_limit(samples: tuple[PowerLimitSample, ...]) -> tuple[PowerLimitSample, ...]:
    by_limit = {sample.limit_w: sample for sample in samples}
    if len(by_limit) < len(samples):
        raise ValueError("two samples have the same limit_w")
    return tuple(by_limit[limit_w] for limit_w in sorted(by_limit))


PowerLimitSamples = Annotated[
    tuple[PowerLimitSample, ...],
    FailFast(),
    Field(max_length=MAX_POWER_LIMITS),
    AfterValidator(_ascending_with_one_for_each_limit),
]


class PowerProfile(WireMessage):
    """The cost of a training's steps under each power limit; the batch size is said beside it.

    Attributes:
        gpus: The devices measured; their maximum power is summed over them, watts.
        samples: One for each power limit. Kept ascending by limit.
    """

    gpus: GpuConfig
    samples: PowerLimitSamples = ()


class PowerLimitChoice(PowerProfile):
    """A training's knowledge of its power limits, and its choice among them.

    Attributes:
        samples: What it has measured itself, and what it was told; at least one.
        chosen_limit_w: The limit that it trains under, watts of each GPU; None where it sets none.
    """

    samples: Annotated[PowerLimitSamples, Field(min_length=1)]
    chosen_limit_w: Watts | None = None

    @field_validator("chosen_limit_w")
    @classmethod
    def _was_measured(cls, chosen_w: float | None, others: ValidationInfo) -> float | None:
        samples: tuple[PowerLimitSample, ...] | None = others.data.get("samples")
        if chosen_w is not None and samples is not None and chosen_w not in {sample.limit_w for sample in samples}:
            raise ValueError(f"{chosen_w:g} W is not the limit_w of any of the samples")
        return chosen_w


class TrialPowerProfile(PowerLimitChoice, TrialId):
    """Body of ``PUT /trials/power_profile``: the power limits of a trial."""
