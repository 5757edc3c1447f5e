"""The process beside a training that puts its GPUs' power limits back should the training be killed.

Usage: ``python -m zeus_plugins.power_limit.restorer PID``, with what to put back on standard input, which the training
holds open. `zeus_plugins.power_limit.guard` starts it, and kills it when there is nothing left to put back.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys

from zeus_plugins.power_limit import records
from zeus_plugins.power_limit.devices import PowerLimitDevice, set_and_check

_STDIN = 0


def main() -> int:
    """Wait for the end of the training, then put back what it left; returns how many limits could not be."""
    # Who wants to end a job often signals all its processes; this one ends by itself, after the training.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    training = int(sys.argv[1])
    order = _read(int.from_bytes(_read(8)))
    # From the training that has started this process, over a pipe of their own.
    found: list[tuple[PowerLimitDevice, float]] = pickle.loads(order)  # noqa: S301
    _wait_for_the_end_of(training)
    failures = 0
    for device, limit_w in found:
        try:
            set_and_check(device, limit_w)
            records.forget(getattr(device, "uuid", None))
        except Exception as error:
            failures += 1
            print(f"the power limit of {device} could not be put back to {limit_w:g} W: {error}", file=sys.stderr)
    return failures


def _read(length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = os.read(_STDIN, length - len(received))
        if not part:  # killed before it had said all, and so before it changed anything
            sys.exit(0)
        received += part
    return received


def _wait_for_the_end_of(training: int) -> None:
    """Return when the training has ended.

    Its end closes the pipe, unless its children (data loaders' workers) have inherited it and live on; Linux therefore
    tells of the process itself, too.
    """
    signs: list[int] = [_STDIN]
    if hasattr(os, "pidfd_open"):
        try:
            signs.append(os.pidfd_open(training))
        except ProcessLookupError:
            return
        except OSError:  # a kernel or a sandbox that does not allow it
            pass
        if os.getppid() != training:
            return
    select.select(signs, [], [])


if __name__ == "__main__":
    sys.exit(main())
