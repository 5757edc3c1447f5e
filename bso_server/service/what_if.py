"""A job under another η and β: what its runs say at once, and the question that a replay of it answers.

Each is a query over one transaction, for a job_id and for knobs of which None stands for the job's own; an infinite β
lets trials cost what they will. Errors as in `service.pages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bso_server.service.loading import known_job
from bso_server.service.page_views import ReplayView, SizeMeans, Tariff, WhatIfPage
from bso_server.service.pages import Found, best_sizes, digest, means_of
from bso_server.simulate.messages import Question
from bso_server.storage import queries as stored_views
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction

MAX_RUNS = 1000
"""A replay draws from at most so many of a job's latest runs."""

ReplayKey = tuple[str, int]
"""The version of a question, and the event of the job up to which its runs count."""


def what_if(
    transaction: Transaction,
    job_id: str,
    eta: float | None,
    beta: float | None,
    *,
    replay: ReplayView | None,
    tariff: Tariff,
    known: str | None = None,
) -> Found[WhatIfPage]:
    """The page of a job under other knobs, with the replay that was asked for."""
    stored = known_job(transaction, job_id)
    eta, beta = _knobs(stored, eta, beta)
    withdrawn = stored_views.withdrawn_count(transaction, job_id)
    version = digest([stored.registration, stored.event_count, withdrawn, eta, beta, replay])
    if version == known:
        return version, None
    job = stored.registration
    tallies = stored_views.tallies(transaction, job_id)
    means, own = means_of(job.model_copy(update={"eta_knob": eta}), tallies), means_of(job, tallies)
    best, own_best = _cheapest(means), _cheapest(own)
    return version, WhatIfPage(
        job=job,
        eta=eta,
        beta=beta,
        batch_size=None if best is None else best.batch_size,
        own_batch_size=None if own_best is None else own_best.batch_size,
        energy_share=None if best is None or own_best is None else _share(best.energy_j, own_best.energy_j),
        time_share=None if best is None or own_best is None else _share(best.time_s, own_best.time_s),
        bound_j=None if best is None or beta is None else beta * best.cost_j,
        means=means,
        best_by_eta=best_sizes(job, means),
        event=stored.event_count,
        replay=replay,
        tariff=tariff,
    )


def replay_key(transaction: Transaction, job_id: str, eta: float | None, beta: float | None, event: int) -> ReplayKey:
    """The key under which the answer to `question` is remembered."""
    stored = known_job(transaction, job_id)
    until = min(event, stored.event_count)
    withdrawn = stored_views.withdrawn_count(transaction, job_id)
    return digest([stored.registration, stored.created_at, withdrawn, _knobs(stored, eta, beta), until]), until


def question(transaction: Transaction, job_id: str, eta: float | None, beta: float | None, until: int) -> Question:
    """The question how the job would go, by its runs up to an event."""
    stored = known_job(transaction, job_id)
    eta, beta = _knobs(stored, eta, beta)
    runs = stored_views.observed_runs(transaction, job_id, until=until, limit=MAX_RUNS)
    return Question(job=stored.registration, runs=tuple(runs), eta=eta, beta=beta)


def _knobs(stored: StoredJob, eta: float | None, beta: float | None) -> tuple[float, float | None]:
    job = stored.registration
    eta = job.eta_knob if eta is None else eta
    beta = job.beta_knob if beta is None else beta
    return eta, None if beta is None or math.isinf(beta) else beta


def _cheapest(means: Sequence[SizeMeans]) -> SizeMeans | None:
    return min(means, key=lambda each: (each.cost_j, each.batch_size), default=None)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
