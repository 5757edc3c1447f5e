"""Lease epochs: which run of a training has its trial.

A training that is preempted, or stops without a word, may go on from a checkpoint elsewhere, and come back to life
where it was: two runs that speak for one trial. So the server counts the runs that it gives a trial to. Each says its
number, the lease epoch, with whatever it sends, and what a run before the latest one sends is refused (a fencing token:
Kleppmann, How to do distributed locking, 2016).

The first run has epoch 1, however often its request for a trial is repeated. A run that resumes takes the trial over
from the epoch that it names, which must be the latest: so that a take-over that the network delivers a second time,
after a later one, changes nothing. To be suspended or abandoned, and to come back, does not raise the epoch.
"""

from __future__ import annotations

from dataclasses import replace

from bso_server.core.model import TrialRecord

FIRST_LEASE_EPOCH = 1


def is_stale(trial: TrialRecord, lease_epoch: int | None) -> bool:
    """True if the trial was given to a later run than the one with this epoch; one that says none is not checked."""
    return lease_epoch not in (None, trial.lease_epoch)


def taken_over(trial: TrialRecord) -> TrialRecord:
    """The trial with one more run of its training, which is the only one that may speak for it."""
    return replace(trial, lease_epoch=trial.lease_epoch + 1)
