"""The outcome of a training that an exception ended, and the report of a failure to its user and the server."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from zeus_plugins.client.outbox import OutboxFile, OutboxHeader, default_outbox
from zeus_plugins.client.port import ServerPort
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSOTrainFailError
from zeus_plugins.protocol import (
    MAX_DETAIL_LENGTH,
    Ending,
    EndingState,
    EndReason,
    JobSpec,
    ReportResponse,
    TrialState,
    printable,
)
from zeus_plugins.training.trial import TrialInfo

_logger = logging.getLogger("zeus_plugins")

# If memory runs out, PyTorch's CUDA allocator raises OutOfMemoryError. cuBLAS, the CPU's allocator and other
# accelerators raise RuntimeError with one of these messages.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|can(no|')t allocate memory|cublas_status_alloc_failed|resource_exhausted",
    re.IGNORECASE,
)

# Errors of Gloo and NCCL on a rank whose peer has ended.
_LOST_PEER = re.compile(r"connection (closed|reset) by peer|remote process exited", re.IGNORECASE)
_LOST_PEER_KINDS = frozenset({"DistBackendError", "DistNetworkError"})

# Packages that run a training many times, to search hyperparameters or to cross-validate.
_STUDIES = ("optuna", "ray.tune", "hyperopt", "nevergrad", "wandb.agents", "sklearn.model_selection")
_FOLDS = "sklearn.model_selection._split"

# Ctrl-C, sys.exit in a handler of SIGTERM, and Lightning's exception at SIGTERM.
_PREEMPTIONS = frozenset({"KeyboardInterrupt", "SystemExit", "SIGTERMException"})


def ending_of(error: BaseException | None, *, early_end: str | None = None) -> Ending:
    """Return the message to the server about a training that ended before the verdict.

    Without an `error`, a rule of the training itself ended it (`early_end`, in words, if known), and the trial counts
    as failed. Within a study, whose trainings may have fewer epochs, such a trial is withdrawn instead.
    """
    if error is None and study_around() is not None:
        return Ending(outcome=TrialState.WITHDRAWN, detail=early_end)
    if error is None:
        return Ending(ended_early=True, detail=early_end)
    return Ending(outcome=outcome_of(error), refused_size=is_refusal_of_size(error), detail=detail_of(error))


def outcome_of(error: BaseException) -> EndingState:
    """Return the outcome of a trial whose training this exception ended.

    SUSPENDED after an interruption (Ctrl-C, SIGTERM), as the training may resume; WITHDRAWN if the configuration or the
    data cannot work at any batch size, or if Optuna pruned the hyperparameters; INFEASIBLE if a device ran out of
    memory; otherwise FAILED.
    """
    if isinstance(error, ZeusBSOConfigError) or "TrialPruned" in _kinds(error):
        return TrialState.WITHDRAWN
    if _kinds(error) & _PREEMPTIONS:
        return TrialState.SUSPENDED
    # An exception that was raised "from" an out-of-memory error reports the same event.
    cause: BaseException | None = error
    while cause is not None:
        if is_out_of_memory(cause):
            return TrialState.INFEASIBLE
        cause = cause.__cause__
    return TrialState.FAILED


def is_refusal_of_size(error: BaseException) -> bool:
    """Return True for an error of this package that another batch size may avoid."""
    return isinstance(error, ZeusBSOConfigError) and error.of_size


def allows_another_size(error: BaseException) -> bool:
    """Return True if the process may train again, at another batch size, after this exception has ended a training."""
    is_crash = outcome_of(error) in (TrialState.FAILED, TrialState.INFEASIBLE) and not is_lost_peer(error)
    return isinstance(error, Exception) and (is_crash or is_refusal_of_size(error))


def release_memory(error: BaseException) -> None:
    """Release the memory of a training that this error has ended."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)  # their variables hold the tensors of the failed step
        cause = cause.__cause__ or cause.__context__
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def study_around() -> str | None:
    """Return the package that runs the present training as one of many, such as ``optuna``; None outside of a study.

    Search the call stack for the modules of such packages. A script's own loop over folds is recognised by a splitter
    of scikit-learn among the local variables of a caller.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        module = str(frame.f_globals.get("__name__", ""))
        found = next((name for name in _STUDIES if module == name or module.startswith(f"{name}.")), None)
        if found is not None:
            return found
        if any(type(value).__module__ == _FOLDS for value in frame.f_locals.values()):
            return "sklearn.model_selection"
    return None


def verdict_at_end(trial: TrialInfo, job: JobSpec, monitor: str, early_end: str | None) -> ReportResponse:
    """Return the verdict on a run that a rule of the trainer (`early_end`, if known) ended before the server did."""
    ended, name = "ended" if early_end is None else f"ended by {early_end}", monitor or "the metric"
    target, metric = job.target_metric, trial.metric
    is_open = target is None and metric is not None
    if target is None or metric is None:
        rest = f", to set the target: {name} {metric:.4g}" if is_open else " before the first evaluation"
    else:
        often = f" in {job.confirm} evaluations in a row" if job.confirm > 1 else ""
        rest = f" before {name} reached {target:g}{often} (it was {metric:.4g})"
    reason = EndReason.NO_TARGET if is_open else EndReason.ENDED_EARLY
    return ReportResponse(stop_train=True, converged=is_open, message=f"{ended}{rest}", reason=reason)


def is_lost_peer(error: BaseException) -> bool:
    """Return True if the error only reports that another process of a distributed training has ended."""
    if is_out_of_memory(error):  # NCCL raises the same class
        return False
    if _kinds(error) & _LOST_PEER_KINDS:
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def detail_of(error: BaseException) -> str:
    """Return the class and message of an exception, shortened to the protocol's maximum length."""
    text = f"{type(error).__name__}: {error}".replace("\x00", "").encode(errors="replace").decode()
    return text[:MAX_DETAIL_LENGTH]


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error says that a device or the machine ran out of memory."""
    if "OutOfMemoryError" in _kinds(error) or isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _kinds(error: BaseException) -> set[str]:
    """Return the names of the error's class and base classes, some of which may not be importable here."""
    return {kind.__name__ for kind in type(error).__mro__}


TRY_AGAIN = "launch the training again to try the next batch size"


def train_fail_error(
    verdict: ReportResponse | None, advice: str | None = None, hint: str = ""
) -> ZeusBSOTrainFailError:
    """Return the error of a trial that ended without its target.

    Its message ends with `TRY_AGAIN` and the `hint`, or with the `advice` in their place. With `advice`, its exit
    status is 1.
    """
    stopped = verdict is not None and verdict.stop_train
    reason = verdict.message if verdict is not None and stopped else "the training ended before the target was reached"
    error = ZeusBSOTrainFailError(f"{reason}; {advice or ', '.join(filter(None, (TRY_AGAIN, hint)))}")
    if advice is not None:
        error.exit_status = 1
    return error


def show_in_one_paragraph() -> None:
    """Make the interpreter print an uncaught `ZeusBSOTrainFailError` without traceback, and exit with its status.

    A traceback would look like a fault, but a missed target is an outcome. Other errors are printed as before.
    """
    if getattr(sys.excepthook, "func", None) is not _excepthook:
        sys.excepthook = functools.partial(_excepthook, sys.excepthook)


def _excepthook(
    otherwise: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, ZeusBSOTrainFailError):
        otherwise(kind, error, trace)
        return
    if error.__cause__ is None and error.__context__ is None:
        print(printable(f"{kind.__module__}.{kind.__qualname__}: {error}"), file=sys.stderr)
    else:
        otherwise(kind, error, trace)
    raise SystemExit(error.exit_status)  # in a hook, this sets the exit status and prints nothing


def end_trial_from_another_rank(
    client: ServerPort, trial: TrialInfo, error: BaseException, sender: OutboxHeader | None = None
) -> None:
    """Report the error that ended the training on a rank other than 0; if the server fails, log a warning.

    Rank 0 at best notices a lost connection, but not the error. An out-of-memory error is written to the outbox first,
    and stays there if the server cannot be reached. `trial` and `sender` are those of rank 0.
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
