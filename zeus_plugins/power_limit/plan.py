"""The decisions of a profiler: the limits to measure, the steps for each, and its states.

This module uses no device, clock or training. A state is an immutable value, and `Window` returns the next state.
`PowerLimitProfiler` derives its actions from the old and the new state:

* The limit in force follows from the new state: the initial limit in `Ready`, the tried limit in `Warmup` and
  `Profiling`, the chosen limit in `Done`.
* A measurement window is open only in `Profiling`. Its result counts if `steps_ended` caused the transition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeus_plugins.energy.cluster import sum_of_nodes
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.selectors import OptimumSelector
from zeus_plugins.protocol import GpuConfig

STEP_W = 25.0
"""Watts between the power limits that are tried, as in the traces of Zeus (NSDI '23)."""

# Drivers use whole milliwatts.
_ROUNDING_W = 0.001

# Keeps the next window long enough if its steps are a little faster.
_MARGIN = 1.05


@dataclass(frozen=True)
class Ready:
    """Between epochs; the next epoch begins with the limit at `position` in the list of limits to measure."""

    position: int = 0


@dataclass(frozen=True)
class Warmup:
    """The limit at `position` is set, and `steps_left` steps pass before it is measured."""

    position: int
    steps_left: int


@dataclass(frozen=True)
class Profiling:
    """The limit at `position` is being measured, and `steps` of its window have ended."""

    position: int
    steps: int = 0


@dataclass(frozen=True)
class Done:
    """The profiling has ended."""


State = Ready | Warmup | Profiling | Done


@dataclass(frozen=True)
class Window:
    """The number of steps under each limit, first to warm up, then to measure; and the transitions between states.

    Raises:
        ZeusBSOConfigError: A number of steps is out of range.
    """

    warmup_steps: int
    profile_steps: int

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.profile_steps < 1:
            raise ZeusBSOConfigError(
                f"warmup_steps is {self.warmup_steps} and profile_steps {self.profile_steps}: at least 0 steps of "
                "warm-up and 1 step measured for each limit"
            )

    def fitted(self, steps: int) -> Window:
        """Return a window of at most `steps`, shrunk in proportion, with at least one measured step."""
        whole = self.warmup_steps + self.profile_steps
        if steps >= whole:
            return self
        profile_steps = max(1, steps * self.profile_steps // whole)
        return Window(max(0, steps - profile_steps), profile_steps)

    def begin(self, position: int, limits: int) -> State:
        """Return the first state of the limit at `position` among `limits`, or `Done` after the last one."""
        if position >= limits:
            return Done()
        return Warmup(position, self.warmup_steps) if self.warmup_steps else Profiling(position)

    def epoch_began(self, state: State, limits: int) -> State:
        """Return the state after the start of an epoch."""
        return self.begin(state.position, limits) if isinstance(state, Ready) else state

    def steps_ended(self, state: State, steps: int, limits: int) -> State:
        """Return the state after `steps` more steps; all steps of a call belong to the same limit and window."""
        match state:
            case Warmup(position, steps_left):
                return Warmup(position, steps_left - steps) if steps < steps_left else Profiling(position)
            case Profiling(position, measured):
                whole = measured + steps >= self.profile_steps
                return self.begin(position + 1, limits) if whole else Profiling(position, measured + steps)
            case _:
                return state

    @staticmethod
    def epoch_ended(state: State) -> State:
        """Return the state after the end of an epoch; an unfinished limit restarts in the next epoch."""
        return Ready(state.position) if isinstance(state, Warmup | Profiling) else state


@dataclass(frozen=True)
class Part:
    """Steps under one limit over all ranks, with their longest time and summed energy."""

    steps: int
    time_s: float
    energy_j: float
    source: str | None = None

    @classmethod
    def of(cls, steps: int, ranks: Sequence[Measurement]) -> Part:
        """Combine the measurements of all ranks in the same steps."""
        longest_s = max(each.time_s for each in ranks)
        return cls(steps, longest_s, sum(each.energy_j for each in ranks), ranks[0].source)

    def plus(self, other: Part | None) -> Part:
        """Return the sum of both."""
        if other is None:
            return self
        return Part(self.steps + other.steps, self.time_s + other.time_s, self.energy_j + other.energy_j, self.source)


@dataclass
class Pace:
    """The number of steps under each limit, adapted to the length of epochs and steps.

    An energy counter changes every 20 to 100 ms, so a window of a few steps may see no change, or one too many.

    Attributes:
        requested: The steps under a limit in an epoch that is long enough.
        warmup_s: The least seconds under a limit before it is measured.
        profile_s: The least seconds for which a limit is measured.
        longest_epoch: Steps of the longest epoch so far, or 0.
        epoch: Steps of the current epoch so far.
        part: Partial measurement of the current limit, accumulated over windows that were too short.
    """

    requested: Window
    warmup_s: float
    profile_s: float
    longest_epoch: int = 0
    epoch: int = 0
    part: Part | None = None

    @property
    def window(self) -> Window:
        """The steps under a limit, fitted to the longest epoch so far."""
        return self.requested.fitted(self.longest_epoch) if self.longest_epoch else self.requested

    def measured(self, part: Part) -> Part | None:
        """Add the measurement of a window, and lengthen later windows if its steps are faster than expected.

        Return the limit's whole measurement, or None if it is still too short.
        """
        warmup_steps, profile_steps = self.requested.warmup_steps, self.requested.profile_steps
        if part.time_s > 0:
            step_s = part.time_s / part.steps
            if self.warmup_s:
                warmup_steps = max(warmup_steps, math.ceil(self.warmup_s / step_s))
            if part.time_s < self.profile_s:
                profile_steps = max(profile_steps, math.ceil(_MARGIN * self.profile_s / step_s))
        whole = part.plus(self.part)
        is_short = 0 < whole.time_s < self.profile_s
        self.requested = Window(warmup_steps, profile_steps)
        self.part = whole if is_short else None
        return None if is_short else whole


class GiveUpError(Exception):
    """The reason why no power limit is chosen."""


@dataclass(frozen=True)
class RankSetup:
    """One rank's devices and earlier measurements, which all ranks gather before the first limit."""

    problem: str | None
    range_w: tuple[float, float] | None
    initial_limits_w: tuple[float, ...]
    gpus: GpuConfig | None
    profile: PowerLimitProfile | None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a window on one rank; `is_changed` is True if another program has changed a limit since."""

    problem: str | None
    measured: Measurement | None
    is_changed: bool


@dataclass(frozen=True)
class Plan:
    """The limits to measure and their measurements, equal on all ranks.

    Attributes:
        selector: Chooses among the measured limits.
        candidates_w: All competing limits in the order of trying, in watts of each GPU.
        queue_w: The candidates that were not measured before this training.
        profile: The measurements so far.
        stops_early: Try no lower limit once costs have risen clearly.
    """

    selector: OptimumSelector
    candidates_w: tuple[float, ...]
    queue_w: tuple[float, ...]
    profile: PowerLimitProfile
    stops_early: bool

    @classmethod
    def agreed(
        cls,
        ranks: Sequence[RankSetup],
        selector: OptimumSelector,
        limits_w: Sequence[float] | None,
        batch_size: int | None,
    ) -> Plan:
        """Return the plan that follows from the gathered setups and the arguments of `PowerLimitProfiler`.

        Raise `GiveUpError` if a rank has a problem, none measures or the models of GPUs differ, and
        `ZeusBSOConfigError` if the GPUs do not accept every limit of `limits_w`.
        """
        devices = [rank.gpus for rank in ranks if rank.gpus is not None]
        ranges_w = [rank.range_w for rank in ranks if rank.range_w is not None]
        problem = next((rank.problem for rank in ranks if rank.problem is not None), None)
        if not devices:
            problem = problem or "no rank has a monitor that measures energy"
        elif not ranges_w:
            problem = problem or "no rank controls a GPU"
        if problem is not None:
            raise GiveUpError(problem)
        try:
            gpus = sum_of_nodes(devices)
        except ZeusBSOConfigError as error:
            raise GiveUpError(str(error)) from error
        profile = ranks[0].profile
        if profile is None or (profile.gpus, profile.batch_size) != (gpus, batch_size):
            profile = PowerLimitProfile(gpus=gpus, batch_size=batch_size)
        initial_w = [limit_w for rank in ranks for limit_w in rank.initial_limits_w]
        lowest_w, highest_w = max(low_w for low_w, _ in ranges_w), min(high_w for _, high_w in ranges_w)
        candidates_w = _candidates_w(lowest_w, highest_w, initial_w, limits_w)
        plan = cls(
            selector=selector,
            candidates_w=candidates_w,
            queue_w=tuple(limit_w for limit_w in candidates_w if limit_w not in profile.limits_w),
            profile=profile,
            stops_early=limits_w is None,
        )
        if plan.is_past_the_best:
            plan = replace(plan, queue_w=tuple(limit_w for limit_w in plan.queue_w if limit_w > profile.limits_w[0]))
        return plan

    @property
    def measured(self) -> PowerLimitProfile:
        """The measurements of the candidates."""
        return self.profile.only(self.candidates_w)

    @property
    def is_past_the_best(self) -> bool:
        """True if the measured costs have risen so clearly that lower limits need not be tried."""
        has_risen = getattr(self.selector, "has_risen", None)
        return self.stops_early and has_risen is not None and bool(has_risen(self.measured))

    def best_w(self) -> float:
        """Choose a measured limit; raise `ZeusBSOBadOperationError` if the selector chooses another one."""
        profile = self.measured
        chosen_w = self.selector.select(profile)
        if chosen_w not in profile.limits_w:
            raise ZeusBSOBadOperationError(
                f"{self.selector} chose {chosen_w!r} W, none of the limits measured: {list(profile.limits_w)}"
            )
        return chosen_w


def _candidates_w(
    lowest_w: float, highest_w: float, initial_w: Sequence[float], limits_w: Sequence[float] | None
) -> tuple[float, ...]:
    """Return the listed limits, or those from the limit in force downwards, so that a training starts at full speed."""
    if limits_w is None:
        first_w = min(highest_w, *initial_w)
        count = max(1, int((first_w - lowest_w) / STEP_W) + 1)
        return tuple(first_w - STEP_W * number for number in range(count))
    outside = [limit_w for limit_w in limits_w if not lowest_w - _ROUNDING_W <= limit_w <= highest_w + _ROUNDING_W]
    if outside:
        raise ZeusBSOConfigError(
            f"limits_w has {outside}, which the GPUs cannot have: they take {lowest_w:g} W to {highest_w:g} W"
        )
    return tuple(limits_w)
