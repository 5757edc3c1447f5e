"""Tries power limits during a training, and keeps the best limit until the training ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import (
    TOLERANCE_W,
    PowerLimitDevice,
    PowerLimitUnavailableError,
    set_and_check,
)
from zeus_plugins.power_limit.guard import LimitGuard, check_free
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
)
from zeus_plugins.power_limit.profile import PowerLimitProfile, PowerLimitSample
from zeus_plugins.power_limit.selectors import OptimumSelector

PASSING_FAILURES = 2
"""Number of failed measurements that are repeated; the next failure ends the profiling."""

_WINDOW = "zeus_power_limit"

_logger = logging.getLogger("zeus_plugins")

Devices = Sequence[PowerLimitDevice] | Callable[[], Sequence[PowerLimitDevice]]
Gather = Callable[[Any], Sequence[Any]]


class PowerLimitProfiler:
    """Finds the best power limit of a training's GPUs; the package's docstring shows the calls.

    Limits are tried from the limit in force downwards, so that an administrator's cap stays. If the initial limits of
    the GPUs on all machines differ, the lowest initial limit is the first.

    With several ranks, each rank has a profiler with the same arguments, except that `devices` and `monitor` are None
    on ranks that control no GPU (usually all ranks but the first of each machine). All ranks call the same methods at
    the same steps. Through `all_gather` they agree on whether limits can be set, on each change of the limit, and on
    each measurement: the longest time and the summed energy.

    Args:
        devices: The GPUs of this rank, or a function that finds them when the first epoch begins. None: no GPU.
        selector: Chooses among the measured limits.
        warmup_steps: Steps under a new limit before it is measured.
        profile_steps: Steps measured under each limit. If an epoch is shorter than `warmup_steps + profile_steps`, both
            shrink in proportion.
        wait_steps: Steps before the first limit, in which the training compiles and the GPUs get warm.
        warmup_s: Least seconds under a new limit before it is measured.
        profile_s: Least seconds measured under each limit, as counters change every 20 to 100 ms. If no epoch is long
            enough, several epochs are added up.
        monitor: Measures time and energy of this rank's GPUs. None: another rank measures them.
        limits_w: Limits to measure, in watts of each GPU, in this order; they may be above the limit in force. None:
            from the limit in force downwards in steps of 25 W.
        profile: Earlier measurements; all ranks use rank 0's. Measurements for the same devices and batch size are not
            repeated.
        batch_size: Global batch size, for the profile.
        all_gather: Takes an object and returns the objects of all ranks, in order of rank. None: there is one rank.
        synchronize: Waits for the work queued on the devices, so that this work falls into the right window.

    Attributes:
        state: `Ready`, `Warmup`, `Profiling` or `Done`.
        chosen_limit_w: The best limit in watts of each GPU; None before it is known, or if no limit can be set.

    Raises:
        ZeusBSOConfigError: An argument is invalid. `on_epoch_begin` raises it for limits that the GPUs cannot have.
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
        all_gather: Gather | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        if limits_w is not None and not limits_w:
            raise ZeusBSOConfigError("limits_w is empty: list the power limits to measure, or leave it out")
        if min(wait_steps, warmup_s, profile_s) < 0:
            raise ZeusBSOConfigError(
                f"wait_steps is {wait_steps}, warmup_s {warmup_s} and profile_s {profile_s}: none is below 0"
            )
        wanted_w = None if limits_w is None else tuple(dict.fromkeys(float(limit_w) for limit_w in limits_w))
        self._rank = _Rank(devices, monitor, synchronize or (lambda: None), profile)
        self._all_gather: Gather = all_gather or _alone
        self._agree = partial(Plan.agreed, selector=selector, limits_w=wanted_w, batch_size=batch_size)
        self._plan: Plan | None = None  # until the first epoch begins
        self._pace = Pace(Window(warmup_steps, profile_steps), warmup_s, profile_s)
        self._wait_steps = wait_steps
        self.state: State = Ready()
        self.chosen_limit_w: float | None = None
        self._set_w: float | None = None  # the limit in force on all ranks; None for the initial limit
        self._is_in_epoch = False
        self._failures = 0

    @property
    def is_done(self) -> bool:
        """True if no further steps need to be counted."""
        return isinstance(self.state, Done)

    @property
    def profile(self) -> PowerLimitProfile | None:
        """The measurements so far; None before the first epoch, or without a monitor that knows the devices."""
        return None if self._plan is None else self._plan.profile

    def on_epoch_begin(self, steps: int | None = None) -> None:
        """Begin a stretch of steps without interruption, and set the limit to measure.

        Measurements are fitted into `steps`, the length of the stretch, if known. Raise `ZeusBSOConfigError` if the
        devices do not accept every limit of `limits_w`.
        """
        if self.is_done:
            return
        if self._plan is None:
            self._begin()
        self.on_epoch_end()
        self._pace.longest_epoch = max(self._pace.longest_epoch, steps or 0)
        self._is_in_epoch = True
        self._start()

    def on_step_end(self, steps: int = 1) -> None:
        """Count the steps since the latest call, and close the window once it has all its steps."""
        if isinstance(self.state, Ready) and self._is_in_epoch:
            self._pace.epoch += steps
            self._wait_steps -= steps
            self._start()
        elif isinstance(self.state, Warmup | Profiling) and self._plan is not None:
            self._pace.epoch += steps
            self._go(self._pace.window.steps_ended(self.state, steps, len(self._plan.queue_w)), steps)

    def on_epoch_end(self) -> None:
        """End a stretch of steps: drop an unfinished measurement and restore the initial limit."""
        self._is_in_epoch = False
        self._go(self._pace.window.epoch_ended(self.state))
        self._pace.longest_epoch = max(self._pace.longest_epoch, self._pace.epoch)
        self._pace.epoch = 0

    def close(self) -> None:
        """End the profiling and restore the initial limits. Never raises.

        It makes no collective call, so it may be called after an exception that other ranks do not have.
        """
        if isinstance(self.state, Profiling):
            self._rank.close_window(is_kept=False)
        self.state = Done()
        self._rank.guard.release()
        # Drop the functions that may refer to the trainer; the results stay.
        self._rank, self._all_gather = _Rank(None, None, lambda: None, None), _alone

    def _begin(self) -> None:
        try:
            self._plan = plan = self._agree(self._all_gather(self._rank.set_up()))
        except GiveUpError as error:
            self._give_up(str(error))
            return
        except ZeusBSOConfigError:
            self.state = Done()
            raise
        if not plan.queue_w:
            self._wait_steps = 0

    def _start(self) -> None:
        """Begin with the next limit, unless steps pass before the first one."""
        if self._plan is not None and not self.is_done and self._wait_steps <= 0:
            self._go(self._pace.window.epoch_began(self.state, len(self._plan.queue_w)))

    def _go(self, new: State, steps: int = 0) -> None:
        """Make a transition, caused by `steps` or by another event (0), and act on it."""
        old = self.state
        if type(old) is type(new) and getattr(old, "position", None) == getattr(new, "position", None):
            self.state = new  # only the step count changed
            return
        try:
            if isinstance(old, Profiling):
                outcome = self._rank.close_window(is_kept=steps > 0)
                if steps:
                    new = self._recorded(old.position, old.steps + steps, outcome, new)
            self.state = new
            self._enter(new)
        except GiveUpError as error:
            self._give_up(str(error))

    def _enter(self, state: State) -> None:
        """Put the limit of a state in force on all ranks, and open its window, if it has one."""
        match state:
            case Ready():
                if self._set_w is not None:
                    self._rank.guard.restore()  # not collective, because it never raises
                self._set_w = None
            case Warmup(position) | Profiling(position) if self._plan is not None:
                refusal = self._set_everywhere(self._plan, self._plan.queue_w[position])
                if refusal is not None:
                    self._warn(f"{refusal}: no further limits are tried")
                    self.state = Done()
                    self._choose()
                elif isinstance(state, Profiling):
                    self._rank.open_window()
                    self._all_gather(None)  # No rank continues before the windows of all ranks are open.
            case Done():
                self._choose()

    def _choose(self) -> None:
        """Put the best measured limit in force."""
        plan = self._plan
        if plan is None:
            self._rank.guard.release()
            return
        try:
            self.chosen_limit_w = plan.best_w()
        except Exception:
            self._rank.guard.release()
            raise
        self._set_everywhere(plan, self.chosen_limit_w)

    def _set_everywhere(self, plan: Plan, limit_w: float) -> str | None:
        """Put a limit in force on all ranks.

        If a device fails or refuses the limit, but others were measured, return the problem; otherwise, and for the
        chosen limit, raise `GiveUpError`.
        """
        if self._set_w == limit_w:
            return None
        problems: Sequence[str | None] = self._all_gather(self._rank.put_in_force(limit_w))
        self._set_w = limit_w
        problem = next((each for each in problems if each is not None), None)
        if problem is not None and (self.is_done or not plan.measured.samples):
            raise GiveUpError(problem)
        return problem

    def _recorded(self, position: int, steps: int, outcome: Outcome, following: State) -> State:
        """Add the measurement of a complete window to the plan, on all ranks, or raise `GiveUpError`.

        Return the next state: `following`, or the same limit again if the monitor failed or the window was too short.
        """
        ranks: Sequence[Outcome] = self._all_gather(outcome)
        plan = self._plan
        problem = next((rank.problem for rank in ranks if rank.problem is not None), None)
        if plan is None:
            raise GiveUpError(problem)
        if problem is not None:
            return self._repeated(plan, position, problem, is_changed=any(rank.is_changed for rank in ranks))
        part = self._pace.measured(Part.of(steps, [rank.measured for rank in ranks if rank.measured is not None]))
        if part is None:
            return Profiling(position)
        self._plan = self._with_sample(plan, position, part)
        return Done() if self._plan.is_past_the_best else following

    def _repeated(self, plan: Plan, position: int, problem: str, *, is_changed: bool) -> State:
        """Return the state that measures a limit again; raise `GiveUpError` after too many failures."""
        self._failures += 1
        if self._failures > PASSING_FAILURES:
            raise GiveUpError(problem)
        _logger.info("a power limit could not be measured (%s); measuring it again", problem)
        if not is_changed:
            return Profiling(position)
        self._set_w = None
        return self._pace.window.begin(position, len(plan.queue_w))

    def _with_sample(self, plan: Plan, position: int, part: Part) -> Plan:
        if part.energy_j == 0 and part.time_s > 0:
            raise GiveUpError(f"the monitor measured 0 J in {part.time_s:.3g} s ({part.source})")
        try:
            sample = PowerLimitSample(limit_w=plan.queue_w[position], **vars(part))
        except ValidationError as error:
            raise GiveUpError(f"a measurement makes no sense: {part} ({error.errors()[0]['msg']})") from error
        _logger.debug("measured power limit %s", sample)
        return replace(plan, profile=plan.profile.with_sample(sample))

    def _give_up(self, problem: str) -> None:
        self._warn(f"no power limit is chosen, and the training continues without a limit of ours: {problem}")
        self.state = Done()
        self.chosen_limit_w = None
        self._rank.guard.release()

    def _warn(self, message: str) -> None:
        """Log a warning; on ranks that control no GPU, log at debug level, because all ranks have the same warning."""
        _logger.log(logging.WARNING if self._rank.controls else logging.DEBUG, message)


class _Rank:
    """The GPUs and the monitor of this rank. Its methods return problems, for all ranks to gather, and never raise."""

    def __init__(
        self,
        devices: Devices | None,
        monitor: EnergyMonitor | None,
        synchronize: Callable[[], None],
        known: PowerLimitProfile | None,
    ) -> None:
        self.controls = devices is not None
        self._find = devices
        self._monitor = monitor
        self._synchronize = synchronize
        self._known = known
        self.guard = LimitGuard(())
        self._problem: str | None = None  # of the current window
        self._failures = 0

    def set_up(self) -> RankSetup:
        problem = range_w = gpus = None
        if self._find is not None:
            try:
                devices = tuple(self._find() if callable(self._find) else self._find)
                self.guard = LimitGuard(devices)
                for device in devices:
                    check_free(device)
                range_w = _range_w(devices, self.guard.initial_limits_w)
                self.guard.claim()
            except Exception as error:
                problem = str(error) if isinstance(error, ZeusBSOConfigError) else f"{type(error).__name__}: {error}"
        if self._monitor is not None:
            try:
                gpus = self._monitor.gpus()
            except Exception as error:
                problem = str(error)
        return RankSetup(problem, range_w, self.guard.initial_limits_w, gpus, self._known)

    def put_in_force(self, limit_w: float) -> str | None:
        """Set a limit, in watts, on all devices, and check that they obey it; return any problem."""
        try:
            self.guard.set_limits(limit_w)
        except Exception as error:
            return str(error) or type(error).__name__
        return None

    def open_window(self) -> None:
        """Begin to measure; `close_window` returns any problem."""
        self._problem = None
        try:
            self._synchronize()
            if self._monitor is not None:
                begin = getattr(self._monitor, "begin_window_at_moves", self._monitor.begin_window)
                begin(self._window)
        except Exception as error:
            self._problem = str(error) or type(error).__name__

    def close_window(self, *, is_kept: bool) -> Outcome:
        """Return the measurement, if this rank has a monitor, or the problem; `is_kept` is False to discard both."""
        measured, limits_w = None, self.guard.limits_w
        try:
            self._synchronize()
            if self._monitor is not None:
                end = self._monitor.end_window
                measured = (getattr(self._monitor, "end_window_at_moves", end) if is_kept else end)(self._window)
            if is_kept:
                self._problem = self.guard.change() or self._problem
        except Exception as error:
            self._problem = self._problem or str(error) or type(error).__name__
        if self._problem is not None:
            self._failures += 1
        return Outcome(self._problem, measured, self.guard.limits_w != limits_w)

    @property
    def _window(self) -> str:
        """A new name after each failure, because a window that could not be ended may still be open."""
        return f"{_WINDOW}_{self._failures}" if self._failures else _WINDOW


def _range_w(devices: Sequence[PowerLimitDevice], initial_w: Sequence[float]) -> tuple[float, float]:
    """Return the range of limits that all devices have, in watts, and warn of limits below the default."""
    if not devices:
        raise PowerLimitUnavailableError("there is no GPU whose power limit could be set")
    lows_w, highs_w = zip(*(device.range_w() for device in devices), strict=True)
    ceilings_w = list(highs_w)
    for device, limit_w in zip(devices, initial_w, strict=True):
        in_force_w, usual_w = device.limit_w(), device.default_limit_w()
        set_and_check(device, in_force_w)  # changes nothing, but fails without permission
        obeyed_w = device.enforced_limit_w()
        # A limit above another limiter would not be obeyed, so the measurement would belong to a lower limit.
        if obeyed_w < in_force_w - TOLERANCE_W:
            ceilings_w.append(obeyed_w)
        if usual_w is not None and limit_w < usual_w - TOLERANCE_W:
            found = f"{device} has a power limit of {limit_w:g} W in force, below its default of {usual_w:g} W"
            remedy = f"`nvidia-smi -i {device.uuid} -pl {usual_w:g}` puts the default back"
            _logger.warning("%s, and none above it is tried. Should a training have left it behind, %s", found, remedy)
    return max(lows_w), min(ceilings_w)


def _alone(thing: Any) -> list[Any]:
    return [thing]
