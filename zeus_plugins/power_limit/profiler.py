"""Tries power limits while a training goes on, and keeps the best one until it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from zeus_plugins.energy import EnergyMonitor, Measurement
from zeus_plugins.energy.cluster import sum_of_nodes
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.power_limit.devices import PowerLimitDevice, PowerLimitUnavailableError, limits_between
from zeus_plugins.power_limit.guard import LimitGuard
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.selectors import OptimumSelector
from zeus_plugins.power_limit.states import Done, Profiling, Ready, State, Warmup, Window, check_transition
from zeus_plugins.protocol import GpuConfig, PowerLimitSample

_WINDOW = "zeus_power_limit"
# Limits of drivers are whole milliwatts.
_TOLERANCE_W = 0.001

_logger = logging.getLogger("zeus_plugins")

T = TypeVar("T")
Devices = Sequence[PowerLimitDevice] | Callable[[], Sequence[PowerLimitDevice]]


@dataclass(frozen=True)
class _RankSetup:
    """One rank's devices and earlier measurements, as all ranks hear of them before the first limit is tried."""

    problem: str | None
    range_w: tuple[float, float] | None
    initial_limits_w: tuple[float, ...]
    gpus: GpuConfig | None
    profile: PowerLimitProfile | None


@dataclass(frozen=True)
class _Outcome:
    """The outcome of one action on one rank."""

    problem: str | None = None
    measured: Measurement | None = None


class PowerLimitProfiler:
    """Finds the best power limit of a training's GPUs; the package's docstring shows how a training calls it.

    The limits that are tried go from the one in force downwards: what an administrator has capped stays capped. Where
    the limits found differ, or several machines train, they start at the lowest of those.

    Several ranks: each has a profiler with the same arguments, except that `devices` and `monitor` are None on those
    that control no GPU, usually all but the first of each machine. All of them call the same methods at the same steps.
    They agree on everything through `all_gather`: on what can be set at all, on each change of the limit, and on each
    measurement, which is the longest time and the summed energy.

    Args:
        devices: The GPUs that this rank controls, or what finds them when the first epoch begins. None: none.
        selector: Chooses among the measured limits.
        warmup_steps: Steps under a new limit before it is measured.
        profile_steps: Steps measured under each limit. Where an epoch has fewer steps than both together, both shrink
            in proportion.
        monitor: Measures time and energy of the GPUs that this rank controls. None: nothing, another rank does.
        limits_w: Limits to measure, watts of each GPU, in this order; they may be above the one in force. None: from
            the one in force downwards in steps of 25 W.
        profile: What was measured earlier. If it was on such devices at this batch size, only limits that it lacks are
            measured; rank 0's counts.
        batch_size: Global batch size, for the profile.
        observe: Only find out which limit is the best, and leave the one that was found in force.
        all_gather: Gives what all ranks passed, in their order, to each of them. None: this is the only one.
        synchronize: Waits for the work queued on the devices, so that it falls into the right window.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `on_epoch_begin` raises it for limits that the GPUs cannot have.
    """

    def __init__(
        self,
        devices: Devices | None,
        selector: OptimumSelector,
        *,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        monitor: EnergyMonitor | None,
        limits_w: Sequence[float] | None = None,
        profile: PowerLimitProfile | None = None,
        batch_size: int | None = None,
        observe: bool = False,
        all_gather: Callable[[Any], Sequence[Any]] | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        if limits_w is not None and not limits_w:
            raise ZeusBSOConfigError("limits_w is empty: list the power limits to measure, or leave it out")
        self._find = devices
        self._controls = devices is not None
        self._selector = selector
        self._requested = self._window = Window(warmup_steps, profile_steps)
        self._monitor = monitor
        self._limits_w = None if limits_w is None else tuple(dict.fromkeys(float(limit_w) for limit_w in limits_w))
        self._known = profile
        self._batch_size = batch_size
        self._observe = observe
        self._all_gather: Callable[[Any], Sequence[Any]] = all_gather or _alone
        self._synchronize: Callable[[], None] = synchronize or _nothing
        self._state: State = Ready()
        self._guard: LimitGuard | None = None
        self._devices: tuple[PowerLimitDevice, ...] = ()
        # All limits that compete, and those of them that are still to be measured.
        self._candidates_w: tuple[float, ...] = ()
        self._queue_w: tuple[float, ...] = ()
        # Whether limits are set; if not, the one in force is measured.
        self._sets_limits = False
        self._has_begun = self._is_closed = False
        # What this rank has set its devices to; None: what was found.
        self._set_w: float | None = None
        self._profile: PowerLimitProfile | None = None
        self._chosen_w: float | None = None
        self._steps_of_longest_epoch = self._steps_of_epoch = 0
        # Why the present window could not begin.
        self._window_problem: str | None = None

    @property
    def state(self) -> State:
        """`Ready`, `Warmup`, `Profiling` or `Done`."""
        return self._state

    @property
    def is_done(self) -> bool:
        """True once steps need not be counted any more."""
        return isinstance(self._state, Done)

    @property
    def profile(self) -> PowerLimitProfile | None:
        """The measurements so far; None before the first epoch, and where no monitor can describe the devices."""
        return self._profile

    @property
    def chosen_limit_w(self) -> float | None:
        """The best limit, watts of each GPU; None before it is known, and when no limit could be set."""
        return self._chosen_w

    def on_epoch_begin(self, steps: int | None = None) -> None:
        """Begin a stretch of steps that nothing else interrupts. The limit to measure is set.

        Args:
            steps: How many there will be, where that is known; measurements are then made to fit in.

        Raises:
            ZeusBSOConfigError: `limits_w` has limits that the devices cannot have.
        """
        if self.is_done:
            return
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        self.on_epoch_end()
        self._steps_of_longest_epoch = max(self._steps_of_longest_epoch, steps or 0)
        if self._steps_of_longest_epoch:
            self._window = self._requested.fitted(self._steps_of_longest_epoch)
        if not self.is_done:
            self._go(self._window.epoch_began(self._state, len(self._queue_w)))

    def on_step_end(self, steps: int = 1) -> None:
        """Count steps that have ended since the last call; a window ends when it has had enough of them."""
        if isinstance(self._state, Warmup | Profiling):
            self._steps_of_epoch += steps
            self._go(self._window.steps_ended(self._state, steps, len(self._queue_w)), steps)

    def on_epoch_end(self) -> None:
        """End a stretch of steps. A measurement that is cut short is dropped; the limit found is in force again."""
        self._go(self._window.epoch_ended(self._state))
        self._steps_of_longest_epoch = max(self._steps_of_longest_epoch, self._steps_of_epoch)
        self._steps_of_epoch = 0

    def close(self) -> None:
        """Put the limits back that were found, and end the profiling; nothing the second time. Never raises.

        It concerns this rank alone, so it may be called where others cannot follow, as after an exception.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if isinstance(self._state, Profiling):
            self._drop_window()
        self._state = Done()
        self._release()
        # They may hold the trainer, which is not needed for asking what was found.
        self._find, self._all_gather, self._synchronize = None, _alone, _nothing

    # The transitions

    def _go(self, new: State, steps: int = 0) -> None:
        """Make a transition, which so many steps have brought about if any, and do what follows from it."""
        old = self._state
        if _is_same(old, new):
            self._state = new
            return
        check_transition(old, new)
        if isinstance(old, Profiling) and not steps:
            self._drop_window()
        elif isinstance(old, Profiling) and not self._record(old.position, old.steps + steps):
            return
        self._state = new
        if self._enter(new) and isinstance(new, Profiling):
            self._window_problem = self._attempt(self._begin_window)[1]

    def _enter(self, state: State) -> bool:
        """Put the limit of a state in force; returns whether that is so, on all ranks."""
        match state:
            case Ready():
                self._restore()  # on each rank for itself: it takes what comes
                return True
            case Warmup(position) | Profiling(position):
                return self._set_everywhere(self._queue_w[position])
            case Done():
                return self._choose()

    def _choose(self) -> bool:
        if not self._sets_limits or self._profile is None:
            self._release()
            return True
        profile = self._profile.only(self._candidates_w)
        try:
            chosen_w = self._selector.select(profile)
            if chosen_w not in profile.limits_w:
                raise ZeusBSOBadOperationError(
                    f"{self._selector} chose {chosen_w!r} W, none of the limits measured: {list(profile.limits_w)}"
                )
        except Exception:
            self._release()
            raise
        self._chosen_w = chosen_w
        if self._observe:
            self._release()
            return True
        return self._set_everywhere(chosen_w)

    def _give_up(self, problem: str) -> None:
        self._warn(f"no power limit is chosen, and the training goes on without one: {problem}")
        if isinstance(self._state, Profiling):
            self._drop_window()
        self._state = Done()
        self._chosen_w = None
        self._release()

    # The beginning

    def _begin(self) -> None:
        ranks: Sequence[_RankSetup] = self._all_gather(self._setup())
        measuring = [rank.gpus for rank in ranks if rank.gpus is not None]
        if not measuring:
            problems = [rank.problem for rank in ranks if rank.problem is not None]
            self._give_up(problems[0] if problems else "no rank has a monitor that measures energy")
            return
        models = sorted({each.gpu_model for each in measuring})
        if len(models) > 1:
            self._give_up(f"the ranks' GPUs are of several models ({', '.join(models)}), and take different limits")
            return
        gpus = sum_of_nodes(measuring)
        known = ranks[0].profile
        if known is None or not known.fits(gpus, self._batch_size):
            known = PowerLimitProfile(gpus=gpus, batch_size=self._batch_size)
        self._profile = known
        self._plan(ranks, gpus)

    def _setup(self) -> _RankSetup:
        problem: str | None = None
        range_w: tuple[float, float] | None = None
        gpus: GpuConfig | None = None
        if self._find is not None:
            try:
                range_w = self._take_charge(self._find() if callable(self._find) else self._find)
            except Exception as error:
                problem = str(error) if isinstance(error, ZeusBSOConfigError) else f"{type(error).__name__}: {error}"
        if self._monitor is not None:
            try:
                gpus = self._monitor.gpus()
            except Exception as error:
                problem = str(error)
        initial_w = self._guard.initial_limits_w if self._guard is not None else ()
        return _RankSetup(problem, range_w, initial_w, gpus, self._known)

    def _take_charge(self, devices: Sequence[PowerLimitDevice]) -> tuple[float, float]:
        """Make sure that limits can be set, and remember those in force; returns the range that all devices have."""
        if not devices:
            raise PowerLimitUnavailableError("there is no GPU whose power limit could be set")
        self._guard = LimitGuard(devices)
        ranges_w = [device.range_w() for device in devices]
        for device, limit_w in zip(devices, self._guard.initial_limits_w, strict=True):
            device.set_limit_w(limit_w)  # it changes nothing, and shows whether it may be done
        self._devices = tuple(devices)
        return max(lowest_w for lowest_w, _ in ranges_w), min(highest_w for _, highest_w in ranges_w)

    def _plan(self, ranks: Sequence[_RankSetup], gpus: GpuConfig) -> None:
        """Decide what is measured; every rank decides the same."""
        ranges_w = [rank.range_w for rank in ranks if rank.range_w is not None]
        initial_w = [limit_w for rank in ranks for limit_w in rank.initial_limits_w]
        problem = next((rank.problem for rank in ranks if rank.problem is not None), None)
        if problem is None and not ranges_w:
            problem = "no rank controls a GPU"
        if problem is not None:
            in_force_w = min(initial_w, default=gpus.max_power / gpus.number_of_gpus)
            self._warn(
                "the power limits are left alone, and only what the training costs under the one in force "
                f"({in_force_w:g} W) is measured: {problem}"
            )
            self._candidates_w = (in_force_w,)
        else:
            lowest_w = max(lowest_w for lowest_w, _ in ranges_w)
            highest_w = min(highest_w for _, highest_w in ranges_w)
            self._candidates_w = self._limits_w or limits_between(lowest_w, min(highest_w, *initial_w))
            outside = [w for w in self._candidates_w if not lowest_w - _TOLERANCE_W <= w <= highest_w + _TOLERANCE_W]
            if outside:
                self._state = Done()
                raise ZeusBSOConfigError(
                    f"limits_w has {outside}, which the GPUs cannot have: they take {lowest_w:g} W to {highest_w:g} W"
                )
            self._sets_limits = True
        measured = () if self._profile is None else self._profile.limits_w
        self._queue_w = tuple(limit_w for limit_w in self._candidates_w if limit_w not in measured)

    # Limits

    def _set_everywhere(self, limit_w: float) -> bool:
        """Set a limit, or give up on all ranks; returns whether it is in force on all of them."""
        if not self._sets_limits or self._set_w == limit_w:
            return True
        problem = self._attempt(lambda: self._set(limit_w))[1]
        self._set_w = limit_w
        return self._outcomes_of_ranks(_Outcome(problem)) is not None

    def _set(self, limit_w: float) -> None:
        if self._guard is not None:
            self._guard.arm()
        for device in self._devices:
            device.set_limit_w(limit_w)

    def _restore(self) -> None:
        if self._set_w is not None and self._guard is not None:
            self._guard.restore()
        self._set_w = None

    def _release(self) -> None:
        self._set_w = None
        if self._guard is not None:
            self._guard.release()

    # Windows

    def _begin_window(self) -> None:
        self._synchronize()
        if self._monitor is not None:
            self._monitor.begin_window(_WINDOW)

    def _end_window(self) -> Measurement | None:
        self._synchronize()
        return None if self._monitor is None else self._monitor.end_window(_WINDOW)

    def _drop_window(self) -> None:
        self._attempt(self._end_window)

    def _record(self, position: int, steps: int) -> bool:
        """Take the measurement of a window that had all its steps into the profile, or give up on all ranks."""
        part, problem = self._attempt(self._end_window)
        ranks = self._outcomes_of_ranks(_Outcome(self._window_problem or problem, part))
        if ranks is None or self._profile is None:
            return False
        parts = [rank.measured for rank in ranks if rank.measured is not None]
        try:
            sample = PowerLimitSample(
                limit_w=self._queue_w[position],
                steps=steps,
                time_s=max(part.time_s for part in parts),
                energy_j=sum(part.energy_j for part in parts),
                source=parts[0].source,
            )
        except ValidationError as error:
            self._give_up(f"a measurement makes no sense: {parts} ({error.errors()[0]['msg']})")
            return False
        self._profile = self._profile.with_sample(sample)
        _logger.debug("measured power limit %s", sample)
        return True

    # Agreement

    def _outcomes_of_ranks(self, mine: _Outcome) -> Sequence[_Outcome] | None:
        """The outcomes on all ranks; None, and all give up, if something went wrong on one of them."""
        ranks: Sequence[_Outcome] = self._all_gather(mine)
        problem = next((rank.problem for rank in ranks if rank.problem is not None), None)
        if problem is None:
            return ranks
        self._state = Done()  # the window, if any, has ended
        self._give_up(problem)
        return None

    def _warn(self, message: str) -> None:
        """Say it once on each machine: every rank knows it."""
        _logger.log(logging.WARNING if self._controls else logging.DEBUG, message)

    @staticmethod
    def _attempt(do: Callable[[], T]) -> tuple[T | None, str | None]:
        """The answer of `do`, or the problem: a rank that raised alone would leave the others waiting."""
        try:
            return do(), None
        except Exception as error:
            return None, str(error) or type(error).__name__


def _alone(thing: T) -> list[T]:
    return [thing]


def _nothing() -> None:
    pass


def _is_same(old: State, new: State) -> bool:
    """True when a state only counts on."""
    if isinstance(old, Warmup | Profiling) and isinstance(new, Warmup | Profiling):
        return type(old) is type(new) and old.position == new.position
    return type(old) is type(new)
