"""The question that a replay of a job answers, and its answer: messages between a server and `simulate.replay`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bso_server.core.model import ObservedRun
from zeus_plugins.protocol import JobRegistration, PositiveFinite, WireMessage

Eta = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Question(WireMessage):
    """A job to be played anew.

    Attributes:
        job: The job, with the η and the β that it has.
        runs: Its runs, which the simulated ones are drawn from.
        eta: The other η.
        beta: The other β; None: nothing is stopped for its cost.
    """

    job: JobRegistration
    runs: tuple[ObservedRun, ...]
    eta: Eta
    beta: PositiveFinite | None


class Outcome(WireMessage):
    """The end of a job under one η and β: means over the times that it was played.

    Attributes:
        eta: η.
        beta: β.
        energy_j: Energy of all trials of all recurrences, joules.
        time_s: Their time, seconds.
        batch_size: The size that most of the last recurrences had.
        share: The share of the last recurrences that had it.
        stopped: Trials that were stopped early, in a job.
    """

    eta: Eta
    beta: PositiveFinite | None
    energy_j: float
    time_s: float
    batch_size: int | None
    share: float
    stopped: float


class Replayed(WireMessage):
    """A job as it would go, played several times with its own η and β and as often with others.

    Attributes:
        runs: The recorded runs that were played from.
        recurrences: Recurrences of a job.
        times: Jobs that were played for each outcome.
        default_batch_size: The job's default, or the size nearest to it that was measured.
        default_energy_j: Energy of as many recurrences at the default; None if it never reaches the target.
        default_time_s: Their time, likewise.
        own: The job with its own η and β.
        other: The job with the others.
    """

    runs: int
    recurrences: int
    times: int
    default_batch_size: int
    default_energy_j: float | None
    default_time_s: float | None
    own: Outcome
    other: Outcome


class Answer(WireMessage):
    """The answer to a question, or the reason why there is none."""

    replayed: Replayed | None = None
    refused: str | None = None
