"""Every test of energy begins without variables that choose a GPU or state watts."""

from __future__ import annotations

from tests.support.energy_bench import plain_environment

__all__ = ["plain_environment"]
