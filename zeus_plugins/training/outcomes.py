"""The end of a training: what an exception means for the trial, and how its user and the server hear of a failure."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from types import TracebackType

from zeus_plugins.client.outbox import OutboxFile, OutboxHeader, default_outbox
from zeus_plugins.client.port import ServerPort
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSOTrainFailError
from zeus_plugins.protocol import MAX_DETAIL_LENGTH, Ending, EndingState, ReportResponse, TrialState
from zeus_plugins.training.trial import TrialInfo

_logger = logging.getLogger("zeus_plugins")

# PyTorch raises OutOfMemoryError for its own allocator; cuBLAS, the CPU's allocator and other accelerators say so
# in the text of a RuntimeError.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|cublas_status_alloc_failed|resource_exhausted|cannot allocate memory",
    re.IGNORECASE,
)

# What a rank hears of another one that is gone, in the words of Gloo and of NCCL.
_LOST_PEER = re.compile(r"connection (closed|reset) by peer|remote process exited", re.IGNORECASE)
_LOST_PEER_KINDS = frozenset({"DistBackendError", "DistNetworkError"})

# Ctrl-C, sys.exit in a handler of SIGTERM, and what Lightning raises at SIGTERM.
_PREEMPTIONS = frozenset({"KeyboardInterrupt", "SystemExit", "SIGTERMException"})


def ending_of(error: BaseException | None, *, early_end: str | None = None) -> Ending:
    """The message to the server about a training that ended before the server said so.

    Args:
        error: The exception that ended it; None: it ended by a rule of its own, which counts as failed.
        early_end: That rule in words, where it is known.
    """
    if error is None:
        return Ending(ended_early=True, detail=early_end)
    return Ending(outcome=outcome_of(error), detail=detail_of(error))


def outcome_of(error: BaseException) -> EndingState:
    """The outcome of a trial whose training was ended by this exception.

    Returns:
        SUSPENDED for an interruption from outside (Ctrl-C, SIGTERM), after which the training may go on; WITHDRAWN when
        the configuration or the data cannot work, whatever the batch size; INFEASIBLE when a device ran out of memory;
        otherwise FAILED.
    """
    if isinstance(error, ZeusBSOConfigError):
        return TrialState.WITHDRAWN
    if _kinds(error) & _PREEMPTIONS:
        return TrialState.SUSPENDED
    # A wrapper raised "from" the error tells of the same event.
    cause: BaseException | None = error
    while cause is not None:
        if _is_out_of_memory(cause):
            return TrialState.INFEASIBLE
        cause = cause.__cause__
    return TrialState.FAILED


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only tells that another process of a distributed training has ended."""
    if _is_out_of_memory(error):  # NCCL says that by the same kind of error
        return False
    if _kinds(error) & _LOST_PEER_KINDS:
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def detail_of(error: BaseException) -> str:
    """The exception in words that fit the wire."""
    text = f"{type(error).__name__}: {error}".replace("\x00", "").encode(errors="replace").decode()
    return text[:MAX_DETAIL_LENGTH]


def _is_out_of_memory(error: BaseException) -> bool:
    if "OutOfMemoryError" in _kinds(error) or isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _kinds(error: BaseException) -> set[str]:
    """Names of its classes: the frameworks that define some of them are not loaded for this."""
    return {kind.__name__ for kind in type(error).__mro__}


def train_fail_error(verdict: ReportResponse | None, advice: str | None = None) -> ZeusBSOTrainFailError:
    """Return the error of a training that has ended without its target; `advice` takes the place of launching again."""
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
    client: ServerPort, trial: TrialInfo, error: BaseException, sender: OutboxHeader | None = None
) -> None:
    """Say what ended the training of a process that has no session.

    Rank 0 hears of such an error as a lost connection at best, and not that memory ran out: that is written to the
    outbox, before anything is waited for, and stays there while the server is away. Logs a warning where the server
    fails, as `TrialSession.end` does. `trial` and `sender` are as rank 0 broadcast them.
    """
    if trial.is_over or is_lost_peer(error):
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
