"""The interface of a policy, and the policies that are installed here: our two, and those of other packages.

A policy is a module of pure functions over `History`, named by one object, `Policy`. A package has its own found by the
entry point group `GROUP`; ours stand in the same form in `_OWN`, so that they are there without any package's metadata
and nobody else's has their names. Everything that depends on a job's policy asks `find`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from bso_server.core.history import History
from bso_server.core.model import EpochBound, Expectations, Suggestion, TrialRecord
from bso_server.errors import PolicyNotInstalledError
from zeus_plugins.protocol import OWN_POLICIES, Decision, JobRegistration, StopRule

if TYPE_CHECKING:
    import numpy as np

GROUP = "zeus_plugins.policies"
"""The entry point group in which packages name their policies."""

MAX_VERSION_LENGTH = 64

Remembered = TypeVar("Remembered")


@dataclass(frozen=True, slots=True)
class Memory(Generic[Remembered]):
    """A policy's memory of a job beyond `History.arms`: a value, made and moved forward by pure functions.

    It stands beside the trials and must equal what a replay of them makes; another version of the policy replays them.

    Attributes:
        kind: Its type: anything that pydantic writes as JSON and reads back as it was, such as a frozen dataclass of
            numbers. Its size must not grow with the number of trials.
        begin: That of a new job.
        after: The value once this trial has ended for good, in whatever way; trials come in the order of their ends.
    """

    kind: type[Remembered]
    begin: Callable[[JobRegistration], Remembered]
    after: Callable[[Remembered, JobRegistration, TrialRecord], Remembered]


def nothing_expected(history: History) -> Expectations:  # noqa: ARG001 - the signature is the interface's
    """The expectations of a policy that has none."""
    return Expectations({}, None)


def own_bound(job: JobRegistration, trial: TrialRecord, min_cost_j: float | None) -> StopRule:  # noqa: ARG001 - the signature is the interface's
    """The rule that stops a trial at its own bound on its epochs, or at `max_epochs` if it has none."""
    return StopRule(max_epochs=job.max_epochs if trial.epoch_bound is None else trial.epoch_bound)


def _as_it_is(job: JobRegistration) -> JobRegistration:
    return job


def _anything(job: JobRegistration) -> None:
    """Every job can be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A way of choosing batch sizes: pure functions, which read no clock and draw from the generator they are given.

    Attributes:
        version: Changes whenever the same trials would make another memory; at most 64 characters.
        suggest: The next trial's batch size and why. May raise `NoSurvivorError`, nothing else. The generator
            is the job's: with the same seed (`mab_seed`) and the same trials it makes the same draws.
        explain: The numbers behind a suggestion, from the history that it was made from. Simulations do not ask.
        expectations: The cost that is expected of each batch size, and the best one.
        stop_rule: When a trial is stopped that has not reached the target. Asked at each report, of the trial before
            it, with the lowest cost (J) of a trial of the job that reached the target, or None.
        bound: The bound of a running trial that was dispatched without one, as of a report; None if it is too early to
            tell. None in place of the function: bounds come with suggestions, or never.
        memory: None if `History` remembers enough.
        prunes: True if jobs begin with a pruning stage, which ends with the first suggestion of `Origin.BANDIT`. Only
            then `History.explorations` are there.
        check: Raises `InvalidJobError` for a new job that the policy could not serve.
        amended: A new job that names no policy, as a Zeus client's, with what `check` would refuse put right.
        missing: Why the policy is not there, for a stand-in (`find`); else None.
    """

    version: str
    suggest: Callable[[History, np.random.Generator], Suggestion]
    explain: Callable[[History, Suggestion], Decision] | None = None
    expectations: Callable[[History], Expectations] = nothing_expected
    stop_rule: Callable[[JobRegistration, TrialRecord, float | None], StopRule] = own_bound
    bound: Callable[[History, TrialRecord], EpochBound | None] | None = None
    memory: Memory[Any] | None = None
    prunes: bool = False
    check: Callable[[JobRegistration], None] = _anything
    amended: Callable[[JobRegistration], JobRegistration] = _as_it_is
    missing: str | None = None

    def begun_memory(self, job: JobRegistration) -> Any:
        """The memory of a new job, or None."""
        return None if self.memory is None else self.memory.begin(job)


# In the notation of entry points, and loaded as they are.
_OWN = {name: EntryPoint(name, f"bso_server.core.{name}.policy:POLICY", GROUP) for name in OWN_POLICIES}


_given: dict[str, Policy] = {}


def find(name: str) -> Policy:
    """The policy of this name.

    One that cannot be had has a stand-in, with which a job's running trials go on to their own bounds: it suggests
    nothing, expects nothing, and says in `Policy.missing` what to do. What is found stays until the process ends.
    """
    return _given.get(name) or _found(name)


@contextmanager
def given(name: str, policy: Policy) -> Iterator[str]:
    """Have a policy found under this name that is not installed, for tests of it."""
    _given[name] = policy
    try:
        yield name
    finally:
        del _given[name]


def look_again() -> None:
    """Forget what was found, for tests that install packages."""
    _found.cache_clear()


# Names come from clients, too: few are remembered.
@lru_cache(maxsize=256)
def _found(name: str) -> Policy:
    found = [_OWN[name]] if name in _OWN else list(entry_points(group=GROUP, name=name))
    if not found:
        *others, last = names()
        meant = get_close_matches(name, [*others, last], n=1)
        return _stand_in(
            f"policy {name!r} is not installed where the server runs, which has {', '.join(others)} and {last}"
            + (f" (did you mean {meant[0]!r}?)" if meant else "")
            + f": install the package that has it (entry point group {GROUP}) there and start the server anew, or use "
            "one of those"
        )
    if len(found) > 1:
        return _stand_in(f"policy {name!r} is in several packages, {_packages(found)}: uninstall all but one of them")
    (entry,) = found
    try:
        policy = entry.load()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return _stand_in(f"policy {name!r}{_packages(found)} cannot be loaded, {what}: mend or update its package")
    if not isinstance(policy, Policy) or not 0 < len(policy.version) <= MAX_VERSION_LENGTH:
        return _stand_in(f"policy {name!r}: {entry.value} is no bso_server.policies.Policy with a version: mend it")
    return policy


def names() -> list[str]:
    """The names of the policies that are installed, ascending; some of them may not be loadable."""
    return sorted({*_OWN, *entry_points(group=GROUP).names})


def installed(name: str) -> Policy:
    """The policy of this name.

    Raises:
        PolicyNotInstalledError: There is none, or it cannot be loaded.
    """
    policy = find(name)
    if policy.missing is not None:
        raise PolicyNotInstalledError(policy.missing)
    return policy


def _stand_in(reason: str) -> Policy:
    def suggest(history: History, rng: np.random.Generator) -> NoReturn:  # noqa: ARG001 - the signature is the interface's
        raise PolicyNotInstalledError(reason)

    return Policy(version="", suggest=suggest, missing=reason)


def _packages(found: list[EntryPoint]) -> str:
    """The packages that have these entry points, in words."""
    packages = sorted({each.dist.name for each in found if each.dist is not None})
    return f" ({' and '.join(packages)})" if packages else ""
