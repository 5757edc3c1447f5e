"""The waits of a power-limit profiler before it measures: for compilation, and a stable temperature."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from zeus_plugins.power_limit.devices import PowerLimitDevice

STABLE_S = 15.0
"""A temperature is stable that has changed by no more than `STABLE_C` in so many seconds."""

STABLE_C = 1.0

PATIENCE_S = 120.0
"""The longest wait for it."""

# Steps between two questions to all ranks.
_POLL_STEPS = 10


class Settling:
    """Tells when the temperature of some devices is stable. Pure: time and temperatures come from outside."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        self._begun_s: float | None = None

    def is_settled(self, now_s: float, temperature_c: float | None) -> bool:
        """Take the highest temperature at an instant, None where nobody tells it.

        Returns:
            True when it is stable, unknown, or was waited for long enough.
        """
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


class Waiting:
    """The steps of a training before its first limit is measured; the ranks agree on their end.

    Args:
        steps: So many at least: what is compiled or benchmarked in them would be measured otherwise.
        all_gather: As in `PowerLimitProfiler`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        steps: int,
        all_gather: Callable[[Any], Sequence[Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_over = False
        self._left = steps
        self._all_gather = all_gather
        self._clock = clock
        self._settling = Settling()

    def pass_steps(self, steps: int, devices: Sequence[PowerLimitDevice]) -> None:
        """Let so many steps pass, on all ranks; `is_over` afterwards says if these were enough."""
        self._left -= steps
        if self.is_over or self._left > 0:
            return
        settled = self._settling.is_settled(self._clock(), _temperature_c(devices))
        self.is_over = all(self._all_gather(settled))
        self._left = _POLL_STEPS


def _temperature_c(devices: Sequence[PowerLimitDevice]) -> float | None:
    """The highest temperature of devices that tell one, in °C."""
    known = []
    for device in devices:
        tell: Callable[[], float] | None = getattr(device, "temperature_c", None)
        try:
            if tell is not None:
                known.append(tell())
        except Exception:  # noqa: S112 - a sensor more or less; limits and energy have their own errors
            continue
    return max(known, default=None)
