"""Occurrences that a server counts in metrics and traces; those in a transaction are sent after its commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from zeus_plugins.protocol import Origin, TrialState


class Outcome(StrEnum):
    """Result of a transaction after all attempts."""

    COMMITTED = "committed"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"


class Refusal(StrEnum):
    """Reason for refusing a caller."""

    NO_TOKEN = "no_token"  # nosec B105  # noqa: S105 - a reason, not a token
    BAD_TOKEN = "bad_token"  # nosec B105  # noqa: S105 - a reason, not a token
    FORBIDDEN = "forbidden"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class TransactionDone:
    """A transaction has ended; `duration_s` includes all attempts and all waiting."""

    writes: bool
    outcome: Outcome
    duration_s: float


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A trial of a job with this policy was dispatched, or recorded after it began without the server."""

    policy: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial has ended in this state. An abandoned trial may be revived and end again."""

    state: TrialState


@dataclass(frozen=True, slots=True)
class CallerRefused:
    """A request was refused."""

    reason: Refusal


Occurrence: TypeAlias = TransactionDone | TrialStarted | TrialEnded | CallerRefused

Listener: TypeAlias = Callable[[Occurrence], None]
"""Handler of an occurrence. It must be quick, because requests wait for it, and must not raise."""


def nobody(_: Occurrence) -> None:
    """Ignore the occurrence."""
