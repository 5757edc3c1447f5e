"""Names that were removed: their import raises an error that names the replacement."""

from __future__ import annotations

from typing import Never

_REMOVED = {
    "ReplayMonitor": "EstimateMonitor(power_w=300.0) needs no GPU either",
    "check_policy": "docs/policy-custom.md lists what to test of a policy",
}


def __getattr__(name: str) -> Never:
    instead = f"{name} was removed: {_REMOVED[name]}" if name in _REMOVED else f"no attribute {name!r}"
    raise AttributeError(f"module {__name__!r}: {instead}")
