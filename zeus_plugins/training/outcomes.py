"""The meaning of an exception that ends a training for its trial."""

from __future__ import annotations

import re

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import MAX_DETAIL_LENGTH, Ending, EndingState, TrialState

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
