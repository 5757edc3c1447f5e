"""What a profiler decides: the plan of the limits to measure, the steps for each, and its states. Pure.

No device, clock or training is known here. A state is a value; `Window.epoch_began`, `steps_ended` and `epoch_ended`
answer with the next one. What has to be done with devices and measurement windows follows from the two states of a
transition (`PowerLimitProfiler`):

* the limit in force is that of the new state (`Ready`: the one that was found; `Warmup`, `Profiling`: the one that is
  tried; `Done`: the chosen one);
* a window is open exactly in `Profiling`, and its measurement counts if the transition was made by `steps_ended`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeus_plugins.energy.cluster import sum_of_nodes
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.selectors import OptimumSelector
from zeus_plugins.protocol import GpuConfig

STEP_W = 25.0
"""Watts between the power limits that are tried, as in the traces of Zeus (NSDI '23)."""

# Limits of drivers are whole milliwatts.
_ROUNDING_W = 0.001

# So that steps that are a little faster the next time do not make the window too short again.
_MARGIN = 1.05


@dataclass(frozen=True)
class Ready:
    """Between epochs. The next one begins with the limit at `position` in the list of limits to measure."""

    position: int = 0


@dataclass(frozen=True)
class Warmup:
    """The limit at `position` is set, and the GPUs get used to it for `steps_left` more steps."""

    position: int
    steps_left: int


@dataclass(frozen=True)
class Profiling:
    """The limit at `position` is being measured; `steps` of its window have ended."""

    position: int
    steps: int = 0


@dataclass(frozen=True)
class Done:
    """There is nothing left to measure."""


State = Ready | Warmup | Profiling | Done

# Every other transition is a defect of this package.
TRANSITIONS: Mapping[type[State], frozenset[type[State]]] = {
    Ready: frozenset({Warmup, Profiling, Done}),
    Warmup: frozenset({Profiling, Ready, Done}),
    Profiling: frozenset({Warmup, Profiling, Ready, Done}),
    Done: frozenset(),
}


def check_transition(old: State, new: State) -> None:
    """Make sure that a transition is legal, or raise `ValueError`."""
    if type(new) not in TRANSITIONS[type(old)]:
        raise ValueError(f"the profiler cannot go from {old} to {new}")


@dataclass(frozen=True)
class Window:
    """The steps that each limit gets, and the transitions between states.

    Args:
        warmup_steps: Steps under a new limit before it is measured.
        profile_steps: Steps measured under each limit.

    Raises:
        ZeusBSOConfigError: They are out of range.
    """

    warmup_steps: int
    profile_steps: int

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.profile_steps < 1:
            raise ZeusBSOConfigError(
                f"warmup_steps is {self.warmup_steps} and profile_steps {self.profile_steps}: at least 0 steps of "
                "warm-up and 1 step measured for each limit"
            )

    @property
    def steps(self) -> int:
        """Steps that a limit takes altogether."""
        return self.warmup_steps + self.profile_steps

    def fitted(self, steps: int) -> Window:
        """This window, made smaller in proportion until a limit can be measured in so many steps, one at least."""
        if steps >= self.steps:
            return self
        profile_steps = max(1, steps * self.profile_steps // self.steps)
        return Window(max(0, steps - profile_steps), profile_steps)

    def begin(self, position: int, limits: int) -> State:
        """The first state of measuring the limit at `position`; `Done` after the last of so many."""
        if position >= limits:
            return Done()
        return Warmup(position, self.warmup_steps) if self.warmup_steps else Profiling(position)

    def epoch_began(self, state: State, limits: int) -> State:
        """The state after an epoch began."""
        return self.begin(state.position, limits) if isinstance(state, Ready) else state

    def steps_ended(self, state: State, steps: int, limits: int) -> State:
        """The state after so many more steps. A change of limit or window happens between calls, so never in a call."""
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
        """The state after an epoch ended: a limit that was not measured to the end begins anew in the next one."""
        return Ready(state.position) if isinstance(state, Warmup | Profiling) else state


@dataclass(frozen=True)
class Part:
    """Steps under one limit, over all ranks: the longest time, and the summed energy."""

    steps: int
    time_s: float
    energy_j: float
    source: str | None = None

    @classmethod
    def of(cls, steps: int, ranks: Sequence[Measurement]) -> Part:
        """Sum up the measurements of one or more ranks in the same steps."""
        longest_s = max(each.time_s for each in ranks)
        return cls(steps, longest_s, sum(each.energy_j for each in ranks), ranks[0].source)

    def plus(self, other: Part | None) -> Part:
        """Both together."""
        if other is None:
            return self
        return Part(self.steps + other.steps, self.time_s + other.time_s, self.energy_j + other.energy_j, self.source)


@dataclass(frozen=True)
class Pace:
    """The steps that a limit gets, by what is known of the epochs and of the time that steps take.

    An energy counter moves every 20 to 100 ms: a window of a few steps may see no move of it, or one too many.

    Attributes:
        requested: The steps that a limit gets in an epoch that is long enough.
        warmup_s: The least seconds under a limit before it is measured.
        profile_s: The least seconds for which a limit is measured.
        longest_epoch: Steps of the longest epoch so far; 0 while none is known.
        epoch: Steps of the present epoch so far.
        part: The measurement of the present limit so far, over adjacent windows that were each too short.
    """

    requested: Window
    warmup_s: float
    profile_s: float
    longest_epoch: int = 0
    epoch: int = 0
    part: Part | None = None

    @property
    def window(self) -> Window:
        """The steps that a limit gets in epochs like these."""
        return self.requested.fitted(self.longest_epoch) if self.longest_epoch else self.requested

    def measured(self, part: Part) -> tuple[Pace, Part | None]:
        """Take the measurement of a window.

        Returns:
            The pace from now on, with windows that are long enough for such steps; and all that was measured of the
            limit, or None if that is too short yet.
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
        requested = Window(warmup_steps, profile_steps)
        return replace(self, requested=requested, part=whole if is_short else None), None if is_short else whole


class GiveUpError(Exception):
    """No power limit is chosen, for this reason."""


@dataclass(frozen=True)
class RankSetup:
    """One rank's devices and earlier measurements, as all ranks hear of them before the first limit is tried."""

    problem: str | None
    range_w: tuple[float, float] | None
    initial_limits_w: tuple[float, ...]
    gpus: GpuConfig | None
    profile: PowerLimitProfile | None
    is_exact: bool


@dataclass(frozen=True)
class Outcome:
    """The outcome of one action on one rank; a limit `is_refused` that a device accepts and does not put in force."""

    problem: str | None = None
    measured: Measurement | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class Plan:
    """The limits to measure and what is known of them; the same on all ranks.

    Attributes:
        selector: Chooses among the measured limits.
        candidates_w: All limits that compete, in the order in which they are tried; watts of each GPU.
        queue_w: Those of them that were not measured before this training.
        profile: The measurements so far.
        is_exact: Windows of any length are exact.
        problem: Why limits cannot be set, so that only the one in force is measured; None: they can.
        stops_early: No lower limit is tried once costs have risen clearly.
    """

    selector: OptimumSelector
    candidates_w: tuple[float, ...]
    queue_w: tuple[float, ...]
    profile: PowerLimitProfile
    is_exact: bool
    problem: str | None
    stops_early: bool

    @classmethod
    def agreed(
        cls,
        ranks: Sequence[RankSetup],
        selector: OptimumSelector,
        limits_w: Sequence[float] | None,
        batch_size: int | None,
    ) -> Plan:
        """Plan by what the ranks tell each other, and the arguments of `PowerLimitProfiler`; every rank plans the same.

        Raises:
            GiveUpError: No rank measures, or the ranks have GPUs of several models.
            ZeusBSOConfigError: `limits_w` has limits that the GPUs cannot have.
        """
        devices = [rank.gpus for rank in ranks if rank.gpus is not None]
        problem = next((rank.problem for rank in ranks if rank.problem is not None), None)
        if not devices:
            raise GiveUpError(problem or "no rank has a monitor that measures energy")
        models = sorted({each.gpu_model for each in devices})
        if len(models) > 1:
            raise GiveUpError(f"the ranks' GPUs are of several models ({', '.join(models)}), and take different limits")
        gpus = sum_of_nodes(devices)
        profile = ranks[0].profile
        if profile is None or (profile.gpus, profile.batch_size) != (gpus, batch_size):
            profile = PowerLimitProfile(gpus=gpus, batch_size=batch_size)
        ranges_w = [rank.range_w for rank in ranks if rank.range_w is not None]
        initial_w = [limit_w for rank in ranks for limit_w in rank.initial_limits_w]
        if not ranges_w:
            problem = problem or "no rank controls a GPU"
        if problem is not None:
            candidates_w: tuple[float, ...] = (min(initial_w, default=gpus.max_power / gpus.number_of_gpus),)
        else:
            lowest_w, highest_w = max(low_w for low_w, _ in ranges_w), min(high_w for _, high_w in ranges_w)
            candidates_w = _candidates_w(lowest_w, highest_w, initial_w, limits_w)
        plan = cls(
            selector=selector,
            candidates_w=candidates_w,
            queue_w=tuple(limit_w for limit_w in candidates_w if limit_w not in profile.limits_w),
            profile=profile,
            is_exact=all(rank.is_exact for rank in ranks if rank.gpus is not None),
            problem=problem,
            stops_early=limits_w is None,
        )
        if plan.is_past_the_best:
            plan = replace(plan, queue_w=tuple(limit_w for limit_w in plan.queue_w if limit_w > profile.limits_w[0]))
        return plan

    @property
    def measured(self) -> PowerLimitProfile:
        """The measurements of the limits that compete."""
        return self.profile.only(self.candidates_w)

    @property
    def is_past_the_best(self) -> bool:
        """True when what was measured shows that lower limits cost more: then they are not tried."""
        has_risen = getattr(self.selector, "has_risen", None)
        return self.stops_early and has_risen is not None and bool(has_risen(self.measured))

    def best_w(self) -> float:
        """Choose one of the measured limits.

        Raises:
            ZeusBSOBadOperationError: The selector chose another one.
        """
        profile = self.measured
        chosen_w = self.selector.select(profile)
        if chosen_w not in profile.limits_w:
            raise ZeusBSOBadOperationError(
                f"{self.selector} chose {chosen_w!r} W, none of the limits measured: {list(profile.limits_w)}"
            )
        return chosen_w


def limits_between(lowest_w: float, highest_w: float, step_w: float = STEP_W) -> tuple[float, ...]:
    """The limits to try, watts: from the highest downwards, so that a training starts at full speed; at least that."""
    count = max(1, int((highest_w - lowest_w) / step_w) + 1)
    return tuple(highest_w - step_w * number for number in range(count))


def _candidates_w(
    lowest_w: float, highest_w: float, initial_w: Sequence[float], limits_w: Sequence[float] | None
) -> tuple[float, ...]:
    """The limits that compete, watts: those that were listed, or all from the one in force downwards."""
    if limits_w is None:
        return limits_between(lowest_w, min(highest_w, *initial_w))
    outside = [limit_w for limit_w in limits_w if not lowest_w - _ROUNDING_W <= limit_w <= highest_w + _ROUNDING_W]
    if outside:
        raise ZeusBSOConfigError(
            f"limits_w has {outside}, which the GPUs cannot have: they take {lowest_w:g} W to {highest_w:g} W"
        )
    return tuple(limits_w)
