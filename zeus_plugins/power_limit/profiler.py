"""Tries power limits while a training goes on, and keeps the best one until it ends."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.energy.nvml import scopes_in
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import (
    TOLERANCE_W,
    PowerLimitDevice,
    PowerLimitNotAppliedError,
    PowerLimitUnavailableError,
    default_limit_w,
    enforced_limit_w,
    set_and_check,
    temperature_c,
)
from zeus_plugins.power_limit.guard import LimitGuard
from zeus_plugins.power_limit.plan import (
    Done,
    GiveUpError,
    Outcome,
    Pace,
    Part,
    Plan,
    Profiling,
    RankSetup,
    Ready,
    State,
    Warmup,
    Window,
    check_transition,
)
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.selectors import OptimumSelector
from zeus_plugins.protocol import PowerLimitSample

PASSING_FAILURES = 2
"""A limit is measured anew after so many failures of the monitor in a training; the next one ends the profiling."""

_WINDOW = "zeus_power_limit"

STABLE_S = 15.0
"""A temperature is stable that has changed by no more than `STABLE_C` in so many seconds."""

STABLE_C = 1.0

PATIENCE_S = 120.0
"""The longest wait for it."""

# Steps between two questions to all ranks.
_POLL_STEPS = 10

_logger = logging.getLogger("zeus_plugins")

T = TypeVar("T")
Devices = Sequence[PowerLimitDevice] | Callable[[], Sequence[PowerLimitDevice]]
Gather = Callable[[Any], Sequence[Any]]


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
        all_gather: Gather | None = None,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limits_w is not None and not limits_w:
            raise ZeusBSOConfigError("limits_w is empty: list the power limits to measure, or leave it out")
        wanted_w = None if limits_w is None else tuple(dict.fromkeys(float(limit_w) for limit_w in limits_w))
        self._rank = _Rank(devices, monitor, synchronize or _nothing, profile)
        self._all_gather: Gather = all_gather or _alone
        self._agree = partial(Plan.agreed, selector=selector, limits_w=wanted_w, batch_size=batch_size)
        self._plan: Plan | None = None  # None: the first epoch has not begun
        self._pace = Pace(Window(warmup_steps, profile_steps), warmup_s, profile_s)
        self._waiting = Waiting(wait_steps, self._all_gather, clock)
        self._state: State = Ready()
        self._observe = observe
        self._chosen_w: float | None = None
        # The limit in force on all ranks; None: what was found.
        self._set_w: float | None = None
        self._is_in_epoch = False
        self._failures = 0

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
        return None if self._plan is None else self._plan.profile

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
        if self._plan is None:
            self._begin()
        self.on_epoch_end()
        self._pace = replace(self._pace, longest_epoch=max(self._pace.longest_epoch, steps or 0))
        self._is_in_epoch = True
        self._start()

    def on_step_end(self, steps: int = 1) -> None:
        """Count steps that have ended since the last call; a window ends when it has had enough of them."""
        counted = replace(self._pace, epoch=self._pace.epoch + steps)
        if isinstance(self._state, Ready) and self._is_in_epoch:
            self._waiting.pass_steps(steps, self._rank.devices)
            self._pace = counted
            self._start()
        elif isinstance(self._state, Warmup | Profiling) and self._plan is not None:
            self._pace = counted
            self._go(self._pace.window.steps_ended(self._state, steps, len(self._plan.queue_w)), steps)

    def on_epoch_end(self) -> None:
        """End a stretch of steps. A measurement that is cut short is dropped; the limit found is in force again."""
        self._is_in_epoch = False
        self._go(self._pace.window.epoch_ended(self._state))
        self._pace = replace(self._pace, longest_epoch=max(self._pace.longest_epoch, self._pace.epoch), epoch=0)

    def close(self) -> None:
        """Put the limits back that were found, and end the profiling; nothing the second time. Never raises.

        It concerns this rank alone, so it may be called where others cannot follow, as after an exception.
        """
        if isinstance(self._state, Profiling):
            self._rank.close_window()
        self._state = Done()
        self._rank.guard.release()
        # They may hold the trainer, which is not needed for asking what was found.
        self._rank.forget()
        self._all_gather = _alone
        self._waiting = Waiting(0, _alone)

    def _begin(self) -> None:
        """Agree with the other ranks on a plan."""
        try:
            plan = self._agree(self._all_gather(self._rank.set_up()))
        except GiveUpError as error:
            self._give_up(str(error))
            return
        except ZeusBSOConfigError:
            self._state = Done()
            raise
        self._plan = plan
        if plan.problem is not None:
            self._warn(
                "the power limits are left alone, and only what the training costs under the one in force "
                f"({plan.candidates_w[0]:g} W) is measured: {plan.problem}"
            )
        if plan.is_exact:
            self._pace = Pace(self._pace.requested, 0.0, 0.0)
        if plan.problem is None and plan.queue_w:
            self._waiting.pass_steps(0, self._rank.devices)
        else:
            self._waiting.is_over = True

    def _start(self) -> None:
        """Begin with the next limit, unless something has to be waited for."""
        if self._plan is not None and not self.is_done and self._waiting.is_over:
            self._go(self._pace.window.epoch_began(self._state, len(self._plan.queue_w)))

    def _go(self, new: State, steps: int = 0) -> None:
        """Make a transition, which so many steps have brought about if any, and do what follows from it."""
        old = self._state
        if type(old) is type(new) and getattr(old, "position", None) == getattr(new, "position", None):
            self._state = new  # it only counts on
            return
        check_transition(old, new)
        try:
            if isinstance(old, Profiling):
                outcome = self._rank.close_window()
                if steps:
                    new = self._recorded(old.position, old.steps + steps, outcome, new)
            self._state = new
            self._enter(new)
        except GiveUpError as error:
            self._give_up(str(error))

    def _enter(self, state: State) -> None:
        """Put the limit of a state in force, on all ranks, and open the window of a limit that is measured."""
        match state:
            case Ready():
                if self._set_w is not None:
                    self._rank.guard.restore()  # on each rank for itself: it takes what comes
                self._set_w = None
            case Warmup(position) | Profiling(position) if self._plan is not None:
                refusal = self._set_everywhere(self._plan, self._plan.queue_w[position])
                if refusal is not None:
                    self._warn(f"{refusal}: the best of the limits that were measured before is taken")
                    self._state = Done()
                    self._choose()
                elif isinstance(state, Profiling):
                    self._rank.open_window()
            case Done():
                self._choose()

    def _choose(self) -> None:
        """Put the best of the measured limits in force, if any may be set."""
        plan = self._plan
        if plan is None or plan.problem is not None:
            self._rank.guard.release()
            return
        try:
            self._chosen_w = plan.best_w()
        except Exception:
            self._rank.guard.release()
            raise
        if self._observe:
            self._rank.guard.release()
        else:
            self._set_everywhere(plan, self._chosen_w)

    def _set_everywhere(self, plan: Plan, limit_w: float) -> str | None:
        """Put a limit in force on all ranks.

        Returns:
            Why it is not in force, if devices refuse it and others can be chosen from; otherwise None.

        Raises:
            GiveUpError: It is not in force on all ranks.
        """
        if plan.problem is not None or self._set_w == limit_w:
            return None
        ranks: Sequence[Outcome] = self._all_gather(self._rank.put_in_force(limit_w))
        self._set_w = limit_w
        problems = [rank for rank in ranks if rank.problem is not None]
        if not problems:
            return None
        if all(rank.is_refused for rank in problems) and plan.measured.samples and not self.is_done:
            return problems[0].problem
        raise GiveUpError(problems[0].problem)

    def _recorded(self, position: int, steps: int, outcome: Outcome, following: State) -> State:
        """Take the measurement of a window that had all its steps into the plan, on all ranks.

        Returns:
            The next state: `following`; or that of the same limit, measured anew where the monitor has failed and
            measured on where the window was too short for it.

        Raises:
            GiveUpError: There is no measurement.
        """
        ranks: Sequence[Outcome] = self._all_gather(outcome)
        problem = next((rank.problem for rank in ranks if rank.problem is not None), None)
        if problem is not None and self._failures < PASSING_FAILURES:
            _logger.info("a power limit could not be measured (%s), and is measured anew", problem)
            self._failures += 1
            return Profiling(position)
        if problem is not None or self._plan is None:
            raise GiveUpError(problem)
        window = Part.of(steps, [rank.measured for rank in ranks if rank.measured is not None])
        self._pace, part = self._pace.measured(window)
        if part is None:
            return Profiling(position)
        self._plan = self._with_sample(self._plan, position, part)
        return Done() if self._plan.is_past_the_best else following

    def _with_sample(self, plan: Plan, position: int, part: Part) -> Plan:
        if part.energy_j == 0 and part.time_s > 0:
            raise GiveUpError(f"the monitor measured 0 J in {part.time_s:.3g} s ({part.source})")
        try:
            sample = PowerLimitSample(limit_w=plan.queue_w[position], **vars(part))
        except ValidationError as error:
            raise GiveUpError(f"a measurement makes no sense: {part} ({error.errors()[0]['msg']})") from error
        _logger.debug("measured power limit %s", sample)
        measured = replace(plan, profile=plan.profile.with_sample(sample))
        if _mixes_scopes(measured.profile) and not _mixes_scopes(plan.profile):
            self._warn(
                "some power limits were measured on the GPUs alone and others on their modules, with CPU and memory, "
                "and do not compare: measure them anew, without the earlier profile"
            )
        return measured

    def _give_up(self, problem: str) -> None:
        self._warn(f"no power limit is chosen, and the training goes on without one: {problem}")
        self._state = Done()
        self._chosen_w = None
        self._rank.guard.release()

    def _warn(self, message: str) -> None:
        """Say it once on each machine: every rank knows it."""
        _logger.log(logging.WARNING if self._rank.controls else logging.DEBUG, message)


class _Rank:
    """The GPUs and the monitor of this rank. Its methods do not raise: all ranks hear of what fails on one of them."""

    def __init__(
        self,
        devices: Devices | None,
        monitor: EnergyMonitor | None,
        synchronize: Callable[[], None],
        known: PowerLimitProfile | None,
    ) -> None:
        self.controls = devices is not None
        self.devices: tuple[PowerLimitDevice, ...] = ()
        self._find = devices
        self._monitor = monitor
        self._synchronize = synchronize
        self._known = known
        self.guard = LimitGuard(())
        # Why the present window could not begin; and how many could not be measured.
        self._problem: str | None = None
        self._failures = 0

    def set_up(self) -> RankSetup:
        """Find the devices, and what they and the monitor allow."""
        setup = RankSetup(None, None, (), None, self._known, getattr(self._monitor, "measures_exactly", False))
        if self._find is not None:
            try:
                devices = self._find() if callable(self._find) else self._find
                self.guard = LimitGuard(devices)
                setup = replace(setup, initial_limits_w=self.guard.initial_limits_w)
                setup = replace(setup, range_w=_range_w(devices, self.guard.initial_limits_w))
                self.devices = tuple(devices)
            except Exception as error:
                problem = str(error) if isinstance(error, ZeusBSOConfigError) else f"{type(error).__name__}: {error}"
                setup = replace(setup, problem=problem)
        if self._monitor is not None:
            try:
                setup = replace(setup, gpus=self._monitor.gpus())
            except Exception as error:
                setup = replace(setup, problem=str(error))
        return setup

    def put_in_force(self, limit_w: float) -> Outcome:
        """Set a limit, watts, on all devices, and see that they obey it."""
        try:
            self.guard.arm(limit_w)
            for device in self.devices:
                set_and_check(device, limit_w)
                obeyed_w = enforced_limit_w(device)
                if obeyed_w < limit_w - TOLERANCE_W:
                    raise PowerLimitNotAppliedError(
                        f"{device} obeys {obeyed_w:g} W, not the {limit_w:g} W that were set"
                    )
        except Exception as error:
            return Outcome(str(error) or type(error).__name__, is_refused=isinstance(error, PowerLimitNotAppliedError))
        return Outcome()

    def open_window(self) -> None:
        """Begin to measure. `close_window` tells what went wrong."""
        self._problem = None
        try:
            self._synchronize()
            if self._monitor is not None:
                self._monitor.begin_window(self._window)
        except Exception as error:
            self._problem = str(error) or type(error).__name__

    def close_window(self) -> Outcome:
        """Return the measurement, if this rank measures, or the problem."""
        measured = None
        try:
            self._synchronize()
            if self._monitor is not None:
                measured = self._monitor.end_window(self._window)
        except Exception as error:
            self._problem = self._problem or str(error) or type(error).__name__
        if self._problem is not None:
            self._failures += 1
        return Outcome(self._problem, measured)

    def forget(self) -> None:
        """Hold no trainer any more."""
        self._find, self._monitor, self._synchronize = None, None, _nothing

    @property
    def _window(self) -> str:
        """Another name after each failure: a window that could not be ended may still be open."""
        return f"{_WINDOW}_{self._failures}" if self._failures else _WINDOW


class Waiting:
    """The steps of a training before its first limit is measured; the ranks agree on their end.

    Args:
        steps: So many at least: what is compiled or benchmarked in them would be measured otherwise.
        all_gather: As in `PowerLimitProfiler`.
    """

    def __init__(self, steps: int, all_gather: Gather, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_over = False
        self._left = steps
        self._all_gather = all_gather
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque()
        self._begun_s: float | None = None

    def pass_steps(self, steps: int, devices: Sequence[PowerLimitDevice]) -> None:
        """Let so many steps pass, on all ranks; `is_over` afterwards says if these were enough."""
        self._left -= steps
        if self.is_over or self._left > 0:
            return
        settled = self.is_settled(self._clock(), temperature_c(devices))
        self.is_over = all(self._all_gather(settled))
        self._left = _POLL_STEPS

    def is_settled(self, now_s: float, temperature_c: float | None) -> bool:
        """Take the highest temperature at an instant; True when it is stable or unknown, or after a long wait."""
        if temperature_c is None:
            return True
        if self._begun_s is None:
            self._begun_s = now_s
        self._seen.append((now_s, temperature_c))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - STABLE_S:
            self._seen.popleft()
        temperatures_c = [each_c for _, each_c in self._seen]
        is_stable = now_s - self._seen[0][0] >= STABLE_S and max(temperatures_c) - min(temperatures_c) <= STABLE_C
        return is_stable or now_s - self._begun_s >= PATIENCE_S


def _range_w(devices: Sequence[PowerLimitDevice], initial_w: Sequence[float]) -> tuple[float, float]:
    """The range that all devices have, watts; a limit that was left behind is a warning.

    Raises:
        PowerLimitUnavailableError: A device does not let its limit be set.
    """
    if not devices:
        raise PowerLimitUnavailableError("there is no GPU whose power limit could be set")
    lows_w, highs_w = zip(*(device.range_w() for device in devices), strict=True)
    ceilings_w = list(highs_w)
    for device, limit_w in zip(devices, initial_w, strict=True):
        in_force_w, usual_w = device.limit_w(), default_limit_w(device)
        set_and_check(device, in_force_w)  # it changes nothing, and shows whether it may be done
        obeyed_w = enforced_limit_w(device)
        # Where another limiter is below the limit that was set, higher ones would be measured under a wrong name.
        if obeyed_w < in_force_w - TOLERANCE_W:
            ceilings_w.append(obeyed_w)
        if usual_w is not None and limit_w < usual_w - TOLERANCE_W:
            _logger.warning(
                "%s has a power limit of %g W in force, below its default of %g W, and none above it is tried. Should "
                "a training have left it behind, `zeus-plugins doctor --reset-power-limits` puts the default back",
                device,
                limit_w,
                usual_w,
            )
    return max(lows_w), min(ceilings_w)


def _mixes_scopes(profile: PowerLimitProfile) -> bool:
    """True when some limits were measured on GPUs alone and others on their modules."""
    return all(scopes_in(sample.source for sample in profile.samples))


def _alone(thing: T) -> list[T]:
    return [thing]


def _nothing() -> None:
    pass
