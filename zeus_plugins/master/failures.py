"""The reason why a run left no result, as far as its exit status, its log and the kernel tell."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Literal

from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.protocol import MAX_DETAIL_LENGTH, TrialState
from zeus_plugins.training.outcomes import outcome_of

_VMSTAT = Path("/proc/vmstat")
_LOG_END_BYTES = 8192
_LAST_LINES = 5
_MEMORY_ERROR = re.compile(r"\b(MemoryError|OutOfMemoryError|std::bad_alloc)\b")
_SHELL_SIGNAL_BASE = 128


class FailedTryError(ZeusBSOTrainFailError):
    """A run of a script left no result.

    Attributes:
        outcome: ``infeasible`` if it ran out of memory, else ``failed``.
        time_s: Its duration, seconds.
    """

    def __init__(self, reason: str, *, outcome: Literal["failed", "infeasible"], time_s: float) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.time_s = time_s


def why_failed(status: int, log: Path, *, oom_kills: int | None) -> tuple[Literal["failed", "infeasible"], str]:
    """The outcome of a run without a result, and the reason in words.

    It is infeasible when memory ran out, by the last lines of the log or by the kernel's word: `oom_kills` counts the
    processes that it has killed meanwhile for want of memory. A status of −n says that signal n ended the run.
    """
    lines = _last_lines(log)
    said = lines[-1] if lines else "it printed nothing"
    number = _signal_of(status)
    if number == signal.SIGKILL and oom_kills:
        return "infeasible", "out of memory: the kernel killed it (SIGKILL)"
    if status != 0:
        for line in reversed(lines):
            if _says_out_of_memory(line):
                return "infeasible", _fitting(f"out of memory: {line}")
    if number == signal.SIGKILL:
        return "failed", _fitting(f"killed by SIGKILL, as by someone or by a memory limit; its last words: {said}")
    if number is not None:
        return "failed", _fitting(f"ended by {signal.Signals(number).name}; its last words: {said}")
    if status:
        return "failed", _fitting(f"exit status {status}; its last words: {said}")
    return "failed", "it ended without an error and wrote no result: the script must write its train.json"


def oom_kills(vmstat: Path = _VMSTAT) -> int | None:
    """Processes that the kernel has killed for want of memory since it started; None where it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


def _says_out_of_memory(line: str) -> bool:
    return bool(_MEMORY_ERROR.search(line)) or outcome_of(RuntimeError(line)) is TrialState.INFEASIBLE


def _signal_of(status: int) -> int | None:
    """The signal that ended a process, also as a shell in between tells it."""
    number = -status if status < 0 else status - _SHELL_SIGNAL_BASE
    return number if number in set(signal.Signals) else None


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_END_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-_LAST_LINES:]


def _fitting(text: str) -> str:
    return text.replace("\x00", "")[:MAX_DETAIL_LENGTH]
