"""Final state of a trial after an exception in its training."""

from __future__ import annotations

import pytest
import torch

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import MAX_DETAIL_LENGTH, TrialState
from zeus_plugins.training.outcomes import detail_of, is_lost_peer, outcome_of


class SIGTERMException(SystemExit):
    """Equivalent of Lightning's exception."""


def caused_by(cause: BaseException) -> Exception:
    error = ValueError("batch 3 of epoch 1 failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("shapes do not match"), TrialState.FAILED),
        (RuntimeError("CUDA error: device-side assert triggered"), TrialState.FAILED),
        (ValueError("the cache is out of memory"), TrialState.FAILED),
        (KeyboardInterrupt(), TrialState.SUSPENDED),
        (SystemExit(143), TrialState.SUSPENDED),
        (SIGTERMException(), TrialState.SUSPENDED),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), TrialState.INFEASIBLE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), TrialState.INFEASIBLE),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"), TrialState.INFEASIBLE),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), TrialState.INFEASIBLE),
        (RuntimeError("MPS backend out of memory"), TrialState.INFEASIBLE),
        (MemoryError(), TrialState.INFEASIBLE),
        (caused_by(torch.OutOfMemoryError("CUDA out of memory")), TrialState.INFEASIBLE),
        (caused_by(ValueError("no such label")), TrialState.FAILED),
        (ZeusBSOConfigError("there is no such metric"), TrialState.WITHDRAWN),
    ],
    ids=repr,
)
def test_exception_determines_the_final_state(error: BaseException, outcome: TrialState) -> None:
    assert outcome_of(error) is outcome


def test_real_out_of_memory_error_makes_the_size_infeasible() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**56, dtype=torch.uint8)
    assert outcome_of(caught.value) is TrialState.INFEASIBLE


def test_detail_fits_into_the_message() -> None:
    assert detail_of(ValueError("no such label")) == "ValueError: no such label"
    assert detail_of(ValueError("a\x00b\ud800")) == "ValueError: ab?"
    assert len(detail_of(ValueError("x" * 5000))) == MAX_DETAIL_LENGTH


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:42191"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.21.5"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (torch.distributed.DistNetworkError("The client socket has timed out"), True),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error, 'out of memory'"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("connection closed by peer"), False),
    ],
    ids=repr,
)
def test_lost_peer_is_distinguished_from_a_cause(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost
