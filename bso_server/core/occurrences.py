"""Occurrences that those who watch a server are told of, each after what it tells of is in force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from zeus_plugins.protocol import Origin, TrialState


class Outcome(StrEnum):
    """The end of a transaction, with all attempts at it."""

    COMMITTED = "committed"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"


class Refusal(StrEnum):
    """The reason for which a caller is turned away."""

    NO_TOKEN = "no_token"  # noqa: S105 - a word of ours, not a token
    BAD_TOKEN = "bad_token"  # noqa: S105 - likewise
    FORBIDDEN = "forbidden"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class TransactionDone:
    """A transaction is over.

    Attributes:
        writes: True unless it could only read.
        outcome: Its end: in force, or the reason why it is not.
        duration_s: Seconds that it took, with all attempts and all waiting.
        repeats: Attempts that the database broke off, after each of which another one was made.
    """

    writes: bool
    outcome: Outcome
    duration_s: float
    repeats: int


@dataclass(frozen=True, slots=True)
class ReportsCommitted:
    """So many reports were taken, or refused each for itself, by one transaction."""

    reports: int


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A trial of a job of this policy was dispatched, or recorded that began without the server."""

    policy: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial has ended in this state; an abandoned one may come back, and then ends once more."""

    state: TrialState


@dataclass(frozen=True, slots=True)
class CallerRefused:
    """A request was turned away."""

    reason: Refusal


Occurrence: TypeAlias = TransactionDone | ReportsCommitted | TrialStarted | TrialEnded | CallerRefused

Listener: TypeAlias = Callable[[Occurrence], None]
"""Takes notice of an occurrence, at once: who waits for an answer waits for it, too. It raises nothing."""


def nobody(_: Occurrence) -> None:
    """The listener where nobody watches."""
