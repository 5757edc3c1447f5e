"""Results that wait in files of an outbox, as trainings leave them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.jobs import job
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Item, Outbox, OutboxFile, OutboxHeader
from zeus_plugins.protocol import CreatedJob, Evaluation, JobView, StopRule, TrialId, TrialState

RULE = StopRule(max_epochs=10)
TRIAL = TrialId(job_id="digits-1", batch_size=32, trial_number=7)


def registration(job_id: str = "digits-1", **fields: object) -> CreatedJob:
    sizes = {"batch_sizes": (32, 64), "default_batch_size": 32}
    spec = {"job_id": job_id, "job_id_prefix": "digits", **sizes, "max_epochs": 10, "beta_knob": None}
    return CreatedJob.model_validate(job(**spec, **fields))


def sender(
    trial: TrialId | None = TRIAL, *, url: str = "http://bso", job_id: str = "digits-1", key: str | None = None
) -> OutboxHeader:
    return OutboxHeader(
        server_url=url,
        registration=registration(job_id),
        batch_size=32 if trial is None else trial.batch_size,
        trial=trial,
        key=key,
    )


def evaluation(epoch: int, metric: float = 0.5) -> Evaluation:
    return Evaluation(time=epoch, energy=10 * epoch, metric=metric, current_epoch=epoch, judged_by=RULE)


def left_by(outbox: Outbox, sender: OutboxHeader, *items: Item) -> Path:
    """Store the items as a dead training does; return the file."""
    box = outbox.box(sender)
    for item in items:
        box.put(item)
    box.close()
    return box.path


def items_of(box: OutboxFile) -> list[Item]:
    found = []
    while (item := box.first) is not None:
        found.append(item)
        box.drop_first()
    return found


def taken_from(outbox: Outbox, path: Path) -> list[Item]:
    """Open the file and take all items, which deletes the file."""
    with closing(outbox.open(path)) as box:
        return items_of(box)


def dispatched(client: BsoClient, job_id: str = "digits-1") -> TrialId:
    """Register the job and begin a trial."""
    client.register(registration(job_id))
    return TrialId(**client.request_trial(job_id).model_dump(include=set(TrialId.model_fields)))


def facts(view: JobView) -> list[tuple[TrialState, float | None, float | None]]:
    """Return state, epochs and joules of each trial."""
    return [(trial.state, trial.epochs, trial.energy_j) for trial in view.trials]


@contextmanager
def no_more_room(path: Path) -> Iterator[None]:
    """Limit the size of files to the present size of this file."""
    resource = pytest.importorskip("resource", reason="only POSIX limits the size of files")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
