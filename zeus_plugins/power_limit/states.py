"""The profiler's states and their legal transitions. Pure: no device, no clock, no training.

A state is a value; `Window.epoch_began`, `steps_ended` and `epoch_ended` answer with the next one. What has to be done
with devices and measurement windows follows from the two states of a transition (`PowerLimitProfiler`):

* the limit in force is that of the new state (`Ready`: the one that was found; `Warmup`, `Profiling`: the one that is
  tried; `Done`: the chosen one);
* a window is open exactly in `Profiling`, and its measurement counts if the transition was made by `steps_ended`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeus_plugins.errors import ZeusBSOConfigError


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

    def fitted(self, steps: int, limits: int = 1) -> Window:
        """This window, made smaller in proportion until so many limits can be measured in so many steps.

        One step is measured at least, so fewer steps than limits take more than one epoch.
        """
        share = max(1, steps // max(1, limits))
        if share >= self.steps:
            return self
        profile_steps = max(1, share * self.profile_steps // self.steps)
        return Window(share - profile_steps, profile_steps)

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
