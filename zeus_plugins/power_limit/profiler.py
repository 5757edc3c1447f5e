"""Tries power limits while a training goes on, and keeps the best one until it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.energy.cluster import sum_of_nodes
from zeus_plugins.energy.nvml_notes import scopes_in
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.power_limit.devices import PowerLimitDevice, PowerLimitUnavailableError
from zeus_plugins.power_limit.guard import LimitGuard
from zeus_plugins.power_limit.measuring import PASSING_FAILURES, LeastTimes, Part, RankWindow
from zeus_plugins.power_limit.planning import (
    Outcome,
    RankSetup,
    initial_limits_w,
    limits_to_try,
    problem_in,
    put_in_force,
    range_of,
)
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.selectors import OptimumSelector
from zeus_plugins.power_limit.states import Done, Profiling, Ready, State, Warmup, Window, check_transition
from zeus_plugins.power_limit.waiting import Waiting
from zeus_plugins.protocol import GpuConfig, PowerLimitSample

_logger = logging.getLogger("zeus_plugins")

T = TypeVar("T")
Devices = Sequence[PowerLimitDevice] | Callable[[], Sequence[PowerLimitDevice]]


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
        wait_steps: Steps before the first limit, in which a training compiles and benchmarks itself. After them it is
            waited until the temperature is stable (within 1 °C for 15 s, two minutes at most), where a device tells it.
        warmup_s: Seconds under a new limit before it is measured, should its steps take less.
        profile_s: Seconds measured under each limit, likewise: counters move every 20 to 100 ms. Where no epoch is
            long enough, those of several epochs count together. A monitor that `measures_exactly` needs neither.
        monitor: Measures time and energy of the GPUs that this rank controls. None: nothing, another rank does.
        limits_w: Limits to measure, watts of each GPU, in this order; they may be above the one in force. None: from
            the one in force downwards in steps of 25 W.
        profile: What was measured earlier. If it was on such devices at this batch size, only limits that it lacks are
            measured; rank 0's counts.
        batch_size: Global batch size, for the profile.
        observe: Only find out which limit is the best, and leave the one that was found in force.
        all_gather: Gives what all ranks passed, in their order, to each of them. None: this is the only one.
        synchronize: Waits for the work queued on the devices, so that it falls into the right window.
        clock: Monotonic seconds.

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
        wait_steps: int = 0,
        warmup_s: float = 0.5,
        profile_s: float = 2.0,
        monitor: EnergyMonitor | None,
        limits_w: Sequence[float] | None = None,
        profile: PowerLimitProfile | None = None,
        batch_size: int | None = None,
        observe: bool = False,
        all_gather: Callable[[Any], Sequence[Any]] | None = None,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
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
        self._rank_window = RankWindow(monitor, synchronize or _nothing)
        self._least = LeastTimes(warmup_s, profile_s)
        self._waiting = Waiting(wait_steps, self._all_gather, clock)
        self._state: State = Ready()
        self._guard: LimitGuard | None = None
        self._devices: tuple[PowerLimitDevice, ...] = ()
        # All limits that compete, and those of them that are still to be measured.
        self._candidates_w: tuple[float, ...] = ()
        self._queue_w: tuple[float, ...] = ()
        # Whether limits are set; if not, the one in force is measured.
        self._sets_limits = False
        self._has_begun = self._is_closed = self._is_in_epoch = False
        # What this rank has set its devices to; None: what was found.
        self._set_w: float | None = None
        self._profile: PowerLimitProfile | None = None
        self._chosen_w: float | None = None
        self._steps_of_longest_epoch = self._steps_of_epoch = 0
        # What was measured of a limit in windows that were too short: where one follows another, nothing is between.
        self._part: Part | None = None

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
        self._is_in_epoch = True
        if not self._queue_w:
            self._waiting.is_over = True
        self._start()

    def on_step_end(self, steps: int = 1) -> None:
        """Count steps that have ended since the last call; a window ends when it has had enough of them."""
        if isinstance(self._state, Ready) and self._is_in_epoch:
            self._waiting.pass_steps(steps, self._devices)
            self._steps_of_epoch += steps
            self._start()
            return
        if isinstance(self._state, Warmup | Profiling):
            self._steps_of_epoch += steps
            self._go(self._window.steps_ended(self._state, steps, len(self._queue_w)), steps)

    def on_epoch_end(self) -> None:
        """End a stretch of steps. A measurement that is cut short is dropped; the limit found is in force again."""
        self._is_in_epoch = False
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
            self._rank_window.close()
        self._state = Done()
        self._release()
        # They may hold the trainer, which is not needed for asking what was found.
        self._find, self._all_gather = None, _alone
        self._rank_window = RankWindow(None, _nothing)
        self._waiting = Waiting(0, _alone)

    # The transitions

    def _start(self) -> None:
        """Begin with the next limit, unless something has to be waited for."""
        if not self.is_done and self._waiting.is_over:
            self._go(self._window.epoch_began(self._state, len(self._queue_w)))

    def _go(self, new: State, steps: int = 0) -> None:
        """Make a transition, which so many steps have brought about if any, and do what follows from it."""
        old = self._state
        if _is_same(old, new):
            self._state = new
            return
        check_transition(old, new)
        if isinstance(old, Profiling) and not steps:
            self._rank_window.close()
        elif isinstance(old, Profiling):
            if not self._record(old.position, old.steps + steps):
                return
            if self._is_past_the_best:
                new = Done()
        self._state = new
        if self._enter(new) and isinstance(new, Profiling):
            self._rank_window.open()

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
            self._rank_window.close()
        self._state = Done()
        self._chosen_w = None
        self._release()

    # The beginning

    def _begin(self) -> None:
        ranks: Sequence[RankSetup] = self._all_gather(self._setup())
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
        if all(rank.is_exact for rank in ranks if rank.gpus is not None):
            self._least = LeastTimes(0.0, 0.0)
        self._plan(ranks, gpus)
        if self._sets_limits:
            self._waiting.pass_steps(0, self._devices)
        self._waiting.is_over = self._waiting.is_over or not self._sets_limits

    def _setup(self) -> RankSetup:
        problem: str | None = None
        range_w: tuple[float, float] | None = None
        gpus: GpuConfig | None = None
        if self._find is not None:
            try:
                devices = self._find() if callable(self._find) else self._find
                self._guard = LimitGuard(devices)
                range_w = range_of(devices, self._guard.initial_limits_w)
                self._devices = tuple(devices)
            except Exception as error:
                problem = str(error) if isinstance(error, ZeusBSOConfigError) else f"{type(error).__name__}: {error}"
        if self._monitor is not None:
            try:
                gpus = self._monitor.gpus()
            except Exception as error:
                problem = str(error)
        initial_w = self._guard.initial_limits_w if self._guard is not None else ()
        is_exact = getattr(self._monitor, "measures_exactly", False)
        return RankSetup(problem, range_w, initial_w, gpus, self._known, is_exact)

    def _plan(self, ranks: Sequence[RankSetup], gpus: GpuConfig) -> None:
        """Decide what is measured; every rank decides the same."""
        try:
            self._candidates_w = limits_to_try(ranks, self._limits_w)
            self._sets_limits = True
        except PowerLimitUnavailableError as error:
            in_force_w = min(initial_limits_w(ranks), default=gpus.max_power / gpus.number_of_gpus)
            self._warn(
                "the power limits are left alone, and only what the training costs under the one in force "
                f"({in_force_w:g} W) is measured: {error}"
            )
            self._candidates_w = (in_force_w,)
        except ZeusBSOConfigError:
            self._state = Done()
            raise
        measured = () if self._profile is None else self._profile.limits_w
        self._queue_w = tuple(limit_w for limit_w in self._candidates_w if limit_w not in measured)
        if self._is_past_the_best:
            lowest_w = min(measured)
            self._queue_w = tuple(limit_w for limit_w in self._queue_w if limit_w > lowest_w)

    @property
    def _is_past_the_best(self) -> bool:
        """True when what was measured shows that lower limits cost more: then they are not tried."""
        has_risen = getattr(self._selector, "has_risen", None)
        if self._limits_w is not None or has_risen is None or self._profile is None:
            return False
        return bool(has_risen(self._profile.only(self._candidates_w)))

    # Limits

    def _set_everywhere(self, limit_w: float) -> bool:
        """Set a limit, or give up on all ranks; returns whether it is in force on all of them."""
        if not self._sets_limits or self._set_w == limit_w:
            return True
        if self._guard is not None:
            self._guard.arm(limit_w)
        ranks: Sequence[Outcome] = self._all_gather(put_in_force(self._devices, limit_w))
        self._set_w = limit_w
        problem = problem_in(ranks)
        if problem is None:
            return True
        has_samples = self._profile is not None and self._profile.only(self._candidates_w).samples
        is_refused = all(rank.is_refused for rank in ranks if rank.problem is not None)
        if is_refused and has_samples and not self.is_done:
            self._warn(f"{problem}: the best of the limits that were measured before is taken")
            self._go(Done())
        else:
            self._state = Done()
            self._give_up(problem)
        return False

    def _restore(self) -> None:
        if self._set_w is not None and self._guard is not None:
            self._guard.restore()
        self._set_w = None

    def _release(self) -> None:
        self._set_w = None
        if self._guard is not None:
            self._guard.release()

    # Windows

    def _record(self, position: int, steps: int) -> bool:
        """Take the measurement of a window that had all its steps into the profile, on all ranks.

        Where the monitor has failed, or the window was too short for it, the limit is measured anew.
        """
        measured, problem = self._rank_window.close()
        ranks: Sequence[Outcome] = self._all_gather(Outcome(problem, measured))
        problem = problem_in(ranks)
        if problem is not None and self._rank_window.failures < PASSING_FAILURES:
            _logger.info("a power limit could not be measured (%s), and is measured anew", problem)
            self._rank_window.failures += 1
            return self._measure_on(position)
        if problem is not None or self._profile is None:
            return self._end_in_vain(problem or "there is no profile")
        part = Part.of(steps, [rank.measured for rank in ranks if rank.measured is not None])
        self._requested = self._least.stretched(self._requested, part)
        self._window = self._requested.fitted(self._steps_of_longest_epoch or self._requested.steps)
        part = part.plus(self._part)
        if 0 < part.time_s < self._least.profile_s:
            self._part = part
            return self._measure_on(position)
        self._part = None
        return self._keep(position, part)

    def _keep(self, position: int, part: Part) -> bool:
        if part.energy_j == 0 and part.time_s > 0:
            return self._end_in_vain(f"the monitor measured 0 J in {part.time_s:.3g} s ({part.source})")
        try:
            sample = PowerLimitSample(limit_w=self._queue_w[position], **vars(part))
        except ValidationError as error:
            return self._end_in_vain(f"a measurement makes no sense: {part} ({error.errors()[0]['msg']})")
        if self._profile is not None:
            was_mixed = all(scopes_in(each.source for each in self._profile.samples))
            self._profile = self._profile.with_sample(sample)
            if all(scopes_in(each.source for each in self._profile.samples)) and not was_mixed:
                self._warn(
                    "some power limits were measured on the GPUs alone and others on their modules, with CPU and "
                    "memory, and do not compare: measure them anew, without the earlier profile"
                )
        _logger.debug("measured power limit %s", sample)
        return True

    def _measure_on(self, position: int) -> bool:
        self._state = Profiling(position)
        self._rank_window.open()
        return False

    def _end_in_vain(self, problem: str) -> bool:
        self._state = Done()  # the window has ended
        self._give_up(problem)
        return False

    def _warn(self, message: str) -> None:
        """Say it once on each machine: every rank knows it."""
        _logger.log(logging.WARNING if self._controls else logging.DEBUG, message)


def _alone(thing: T) -> list[T]:
    return [thing]


def _nothing() -> None:
    pass


def _is_same(old: State, new: State) -> bool:
    """True when a state only counts on."""
    if isinstance(old, Warmup | Profiling) and isinstance(new, Warmup | Profiling):
        return type(old) is type(new) and old.position == new.position
    return type(old) is type(new)
