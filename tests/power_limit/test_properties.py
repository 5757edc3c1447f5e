"""For every order of events, each GPU has a permitted limit, and finally its initial limit."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import event, example, given, settings

from tests.support.power_limit_bench import LIMITS_W, MOVES, TABLE, Breaks, Failing, ReplayMachine, profiler
from tests.support.properties import examples
from zeus_plugins.energy import EnergyUnavailableError, Measurement
from zeus_plugins.power_limit import Energy, PowerLimitProfiler, Time, ZeusCost
from zeus_plugins.power_limit.plan import Done, Profiling, Ready, Warmup

EVENTS = st.one_of(
    st.tuples(st.just("begin"), st.none() | st.integers(0, 12)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("end"), st.none()),
    # Next failure: of the next settings of a GPU's limit (this number), or of the next call of the monitor.
    st.tuples(st.just("break device"), st.integers(0, 2)),
    st.tuples(st.just("break monitor"), st.none()),
    st.tuples(st.just("close"), st.none()),
)
# Ordinary trainings, epoch by epoch, so that many runs reach a choice; then arbitrary events.
TRAININGS = st.lists(st.integers(0, 16), max_size=6).map(
    lambda epochs: [event for steps in epochs for event in (("begin", None), *[("step", 1)] * steps, ("end", None))]
)


# Values of `takes` for a device that refuses its next limit once, and for a device that refuses none.
BROKEN, SOUND = 0, -1


class FragileMonitor(Failing):
    """A monitor that fails once at its next window on request, with a count of open windows."""

    def __init__(self, where: ReplayMachine) -> None:
        super().__init__(where, "")
        self.is_broken = False
        self.open = 0

    def begin_window(self, name: str) -> None:
        self._break()
        super().begin_window(name)
        self.open += 1

    def end_window(self, name: str) -> Measurement:
        measured = super().end_window(name)
        self.open -= 1
        self._break()
        return measured

    def _break(self) -> None:
        if self.is_broken:
            self.is_broken = False
            raise EnergyUnavailableError("gone")


def entitled_w(profiler: PowerLimitProfiler, found_w: float, may_set: bool) -> set[float]:
    """Return the permitted limits of a GPU at this moment."""
    if not may_set:
        return {found_w}
    match profiler.state:
        case Ready():
            return {found_w}
        case Warmup(position) | Profiling(position):
            return {LIMITS_W[position]}
        case Done():
            return {found_w if profiler.chosen_limit_w is None else profiler.chosen_limit_w}


@settings(max_examples=examples(400), deadline=None)
@given(
    found_w=st.sampled_from(sorted(TABLE)),
    warmup_steps=st.integers(0, 2),
    profile_steps=st.integers(1, 3),
    selector=st.sampled_from([Energy(), Time(), ZeusCost(0.5)]),
    trained=TRAININGS,
    events=st.lists(EVENTS, max_size=30),
)
@example(
    found_w=100.0,
    warmup_steps=0,
    profile_steps=1,
    selector=Energy(),
    trained=[("begin", None), *[("step", 1)] * 3],
    events=[("break device", 1), ("step", 1)],
)
# The device refuses one restore, in the middle of another limit.
@example(
    found_w=250.0,
    warmup_steps=0,
    profile_steps=1,
    selector=Energy(),
    trained=[("begin", None), ("step", 1)],
    events=[("break device", 1), ("end", None)],
)
def test_every_gpu_has_a_permitted_limit(
    found_w: float,
    warmup_steps: int,
    profile_steps: int,
    selector: Any,
    trained: list[tuple[str, int | None]],
    events: list[tuple[str, int | None]],
) -> None:
    where = ReplayMachine(TABLE, number_of_gpus=3)
    devices = [Breaks(device, SOUND) for device in where.devices]
    for device in devices:
        device.set_limit_w(found_w)
    monitor = FragileMonitor(where)
    options = {"warmup_steps": warmup_steps, "profile_steps": profile_steps}
    zeus = profiler(where, selector, devices=devices, monitor=monitor, **options)
    is_closed = has_begun = is_forbidden = False
    for what, number in [*trained, *events]:
        before = zeus.state
        match what:
            case "begin":
                # The first set repeats the limit in force as a test of permission; the monitor must answer, too.
                if not has_begun and not is_closed:
                    is_forbidden = any(device.takes == BROKEN for device in devices)
                    has_begun = True
                zeus.on_epoch_begin(number)
            case "step":
                where.train(number or 1)
                zeus.on_step_end(number or 1)
            case "end":
                zeus.on_epoch_end()
            case "break device":
                devices[number or 0].takes = BROKEN
            case "break monitor":
                monitor.is_broken = True
            case "close":
                # An exit restores limits with working devices only; another test covers devices that refuse then.
                for device in devices:
                    device.takes = SOUND
                zeus.close()
                is_closed = True
        if isinstance(before, Ready | Warmup | Profiling) and not is_closed and what in ("step", "end"):
            assert type(zeus.state) is type(before) or type(zeus.state) in MOVES[type(before)]
        assert isinstance(zeus.state, Profiling) or monitor.open == 0
        limits_w = {device.limit_w() for device in devices}
        if not any(device.takes == BROKEN for device in devices):
            assert limits_w <= entitled_w(zeus, found_w, not (is_closed or is_forbidden)), (what, zeus.state)
    event(f"{type(zeus.state).__name__}, chosen: {zeus.chosen_limit_w}")
    for device in devices:
        device.takes = SOUND
    zeus.close()
    assert [device.limit_w() for device in devices] == [found_w] * 3
    assert monitor.open == 0
