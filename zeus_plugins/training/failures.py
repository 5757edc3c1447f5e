"""Words for a training that failed: to its user, in one paragraph, and of another rank's to the server."""

from __future__ import annotations

import contextlib
import logging
import sys
from types import TracebackType

from zeus_plugins.client.outbox import OutboxFile, OutboxHeader, default_outbox
from zeus_plugins.client.port import ServerPort
from zeus_plugins.errors import ZeusBSOError, ZeusBSOTrainFailError
from zeus_plugins.protocol import Ending, ReportResponse, TrialState
from zeus_plugins.training.outcomes import ending_of, is_lost_peer
from zeus_plugins.training.trial import TrialInfo

_logger = logging.getLogger("zeus_plugins")


def train_fail_error(verdict: ReportResponse | None, advice: str | None = None) -> ZeusBSOTrainFailError:
    """The error of a training that has ended without reaching its target.

    Args:
        verdict: The latest one.
        advice: What to do next, where launching again is not it.
    """
    stopped = verdict is not None and verdict.stop_train
    reason = verdict.message if verdict is not None and stopped else "the training ended before the target was reached"
    error = ZeusBSOTrainFailError(f"{reason}; {advice or 'launch the training again to try the next batch size'}")
    if advice is not None:
        error.exit_status = 1
    return error


def show_in_one_paragraph() -> None:
    """Have the interpreter print a `ZeusBSOTrainFailError` that nobody catches without its traceback.

    It is an outcome, not a fault: the lines of a framework's teardown say nothing about it, and the exit status is the
    error's own. All other errors are printed, and end the interpreter, as before.
    """
    if isinstance(sys.excepthook, _Paragraph):
        return
    sys.excepthook = _Paragraph(sys.excepthook)


def end_trial_from_another_rank(
    client: ServerPort, trial: TrialInfo | None, error: BaseException | None, sender: OutboxHeader | None = None
) -> None:
    """Say what ended the training of a process that has no session.

    Rank 0 hears of such an error as a lost connection at best, and not that memory ran out: that is written to the
    outbox, before anything is waited for, and stays there while the server is away. Logs a warning where the server
    fails, as `TrialSession.end` does.

    Args:
        client: Talks to the server.
        trial: The trial as rank 0 broadcast it, or None.
        error: What ended the training of this process.
        sender: Where the trial's results belong, as rank 0 broadcast it, or None.
    """
    if error is None or trial is None or trial.is_over or is_lost_peer(error):
        return
    ending = ending_of(error)
    box = None
    if sender is not None and ending.outcome is TrialState.INFEASIBLE:
        box = _kept(sender, ending)
    try:
        if trial.trial_id is not None:
            client.end_trial(trial.trial_id, ending)
            if box is not None:
                box.drop_first()
    except ZeusBSOError as failure:
        _logger.warning("could not end trial %d of job %s: %s", trial.trial_number, trial.job_id, failure)
    finally:
        if box is not None:
            box.close()


def _kept(sender: OutboxHeader, ending: Ending) -> OutboxFile | None:
    try:
        box = default_outbox().box(sender, is_first=False)
    except OSError as failure:
        _logger.warning("could not write to the outbox that memory ran out: %s", failure)
        return None
    with contextlib.suppress(OSError):
        box.put(ending)
    return box


class _Paragraph:
    """An `sys.excepthook` before another one."""

    def __init__(self, otherwise: object) -> None:
        self._otherwise = otherwise

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        missed_target = error if isinstance(error, ZeusBSOTrainFailError) else None
        if missed_target is not None and error.__cause__ is None and error.__context__ is None:
            print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr)
        else:
            self._otherwise(kind, error, traceback)  # type: ignore[operator]
        if missed_target is not None:
            # Raised by a hook, it sets the status and prints nothing.
            raise SystemExit(missed_target.exit_status)
