"""Decisions on batch sizes: what was believed, and what followed."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from zeus_plugins.protocol._trials import StopRule
from zeus_plugins.protocol._values import (
    BatchSize,
    Identifier,
    Origin,
    PositiveInt,
    TrialState,
    WireMessage,
)

# What one decision keeps at most, so that a trial's takes less than 4 KiB however many sizes its job has.
MAX_BELIEFS = 64
MAX_CANDIDATES = 16


# Of no cost, nor of a part of one; numbers beyond it would take a digit more.
_LARGEST = 1e99


def _rounded(value: Any) -> Any:
    """A number with four significant digits, which nobody reads more of; None for what is none."""
    if not isinstance(value, int | float):
        return value
    if not abs(value) < _LARGEST:
        return None
    return float(f"{value:.4g}") if abs(value) > 1 / _LARGEST else 0.0


def _rounded_chance(value: Any) -> Any:
    """A probability in thousandths."""
    return round(value, 3) if isinstance(value, int | float) and math.isfinite(value) else value


Rounded = Annotated[float, BeforeValidator(_rounded)]
MaybeRounded = Annotated[float | None, BeforeValidator(_rounded)]
Chance = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_rounded_chance)]


class SizeBelief(WireMessage):
    """The belief about one batch size; None, here and below, where nothing was known.

    Attributes:
        batch_size: The size.
        expected_cost_j: Expected cost of a run until the target, joules.
        low_j: With a probability of 5 % the expected cost is below that, joules.
        high_j: With a probability of 5 % it is above that.
        chance_best: Probability that no other size has a lower expected cost.
    """

    batch_size: BatchSize
    expected_cost_j: MaybeRounded = None
    low_j: MaybeRounded = None
    high_j: MaybeRounded = None
    chance_best: Chance | None = None


class CandidateWorth(WireMessage):
    """The worth of a try of one batch size, in runs of the incumbent.

    Attributes:
        batch_size: The size.
        value: What later runs were expected to save by knowing how a run of it goes.
        loss: What that run was expected to cost more than one of the incumbent.
        stop_epochs: Epochs after which the try would have been stopped; None where that was not known yet.
    """

    batch_size: BatchSize
    value: Rounded
    loss: Rounded
    stop_epochs: PositiveInt | None = None


class Decision(WireMessage):
    """The numbers behind the choice of a batch size, rounded to four digits, and of bounded length.

    Attributes:
        sizes: The sizes that could be chosen, ascending; of more than 64 those most likely to be the best.
        candidates: The sizes whose try was considered, ascending; of more than 16 those worth most. Empty with policies
            that do not weigh tries.
        incumbent: The size that is played when nothing is to be learned; None while none has reached the target.
        stop: When the trial is stopped without the target, as far as that was known by then.
    """

    sizes: tuple[SizeBelief, ...] = ()
    candidates: tuple[CandidateWorth, ...] = ()
    incumbent: BatchSize | None = None
    stop: StopRule | None = None

    @field_validator("sizes")
    @classmethod
    def _likeliest(cls, sizes: tuple[SizeBelief, ...]) -> tuple[SizeBelief, ...]:
        likeliest = sorted(sizes, key=lambda each: -1.0 if each.chance_best is None else each.chance_best, reverse=True)
        return tuple(sorted(likeliest[:MAX_BELIEFS], key=lambda each: each.batch_size))

    @field_validator("candidates")
    @classmethod
    def _worthiest(cls, candidates: tuple[CandidateWorth, ...]) -> tuple[CandidateWorth, ...]:
        worthiest = sorted(candidates, key=lambda each: each.value - each.loss, reverse=True)
        return tuple(sorted(worthiest[:MAX_CANDIDATES], key=lambda each: each.batch_size))


class Explanation(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/explanation`` and of ``bso-server jobs explain --json``.

    Attributes:
        job_id: The job.
        policy: How its batch sizes are chosen.
        trial_number: The trial that is explained; None for the one that would be started next.
        batch_size: Its batch size.
        origin: Why it was dispatched.
        state: Where it stands; None for one that would be started.
        sentence: Why it has this size, and when it is stopped, for a person.
        decision: The numbers behind that; None for trials that no policy has chosen, or before version 0.2.
    """

    job_id: Identifier
    policy: str
    trial_number: PositiveInt | None
    batch_size: BatchSize
    origin: Origin
    state: TrialState | None
    sentence: str
    decision: Decision | None
