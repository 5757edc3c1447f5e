"""Numbers of examples, and arbitrary jobs, for property tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeus_plugins.protocol import OWN_POLICIES

THOROUGH = 100


def examples(number: int) -> int:
    """Return `number` in a thorough run, and the proportional share of the profile in `make test`; at least four."""
    return max(4, number * settings().max_examples // THOROUGH)


def any_job(number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a test the `seed` of a random source, and `fields` of a job with few explorations."""
    windows, rounds = st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 2])
    chosen = {"window_size": windows, "num_pruning_rounds": rounds, "policy": st.sampled_from(OWN_POLICIES)}
    fields = st.fixed_dictionaries({**chosen, "mab_num_explorations": st.just(1)})
    checks = [HealthCheck.function_scoped_fixture]
    limits = settings(max_examples=examples(number), deadline=None, suppress_health_check=checks)
    return lambda test: limits(given(seed=st.integers(0, 2**32), fields=fields)(test))
