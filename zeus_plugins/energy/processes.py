"""CPU time of a training and its workers, and the time for which it waits for a core, from the operating system."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from zeus_plugins.environment import LOCAL_WORLD_SIZE

PROC = Path("/proc")

# The namespace of processes outside of all containers: PROC_PID_INIT_INO of Linux.
_FIRST_NAMESPACE = f"pid:[{0xEFFFFFFC}]"

# Places in /proc/PID/stat behind the name: the parent; CPU time in user and system mode, also of ended children.
_PARENT, _TIMES = 1, slice(11, 15)


def reports_cpu_time(others: Collection[int] = (), proc: Path = PROC) -> bool:
    """Return whether the system reports the CPU time of this process, its children and the processes `others`."""
    return _shows_all(proc) or not {*others} - {os.getpid()}


def cpu_time_s(others: Collection[int] = (), proc: Path = PROC) -> float | None:
    """Return the CPU seconds of this process, the processes `others` and all their descendants; None if unknown.

    Systems other than Linux report a child only after it has ended, such as a data loader's worker after an epoch.
    """
    if not reports_cpu_time(others, proc):
        return None
    own = os.getpid()
    # Read living children first: a child that ends between the two readings is counted twice for a moment, not missed.
    has_others = _shows_all(proc) and bool({*others} - {own} or _has_children())
    living_s = 0.0
    if has_others:
        family = family_of({own, *others}, proc)
        living_s = sum(family[process] for process in family.keys() - {own}) / os.sysconf("SC_CLK_TCK")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + living_s


def _shows_all(proc: Path) -> bool:
    """Return whether the system shows all processes, as Linux does."""
    return proc.joinpath("self/stat").exists()


def _has_children() -> bool:
    """Return whether this process has children; a search through all processes would take milliseconds."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def family_of(roots: Collection[int], proc: Path = PROC) -> dict[int, int]:
    """Return the CPU ticks of `roots` and their living descendants, by process id; 0 for a root that is not shown."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir(proc) if proc.exists() else ()):
        try:
            fields = proc.joinpath(name, "stat").read_bytes().rpartition(b")")[2].split()
            ticks[int(name)] = sum(map(int, fields[_TIMES]))
            children.setdefault(int(fields[_PARENT]), []).append(int(name))
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    family: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        process = waiting.pop()
        if process not in family:
            family[process] = ticks.get(process, 0)
            waiting += children.get(process, ())
    return family


def own_processes(others: Collection[int] = ()) -> set[int]:
    """Return the ids of this training's processes on the machine: this one, `others`, and their descendants.

    If `multiprocessing` or a launcher of several processes (LOCAL_WORLD_SIZE) started this one, its siblings are
    included.
    """
    roots = {os.getpid(), *others}
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        roots.add(parent.pid)
    if LOCAL_WORLD_SIZE.text() not in (None, "", "1"):
        roots.add(os.getppid())
    return set(family_of(roots))


def is_hidden(process: int, proc: Path = PROC) -> bool:
    """Return whether this process is in a container that does not show the process with this id."""
    try:
        return os.readlink(proc / "self/ns/pid") != _FIRST_NAMESPACE and not (proc / str(process)).exists()
    except OSError:
        return False


def waits_s(proc: Path = PROC) -> dict[int, float] | None:
    """Return the seconds for which each thread of this process waited for a core; None if the system has no count."""
    found = {}
    try:
        for thread in os.listdir(proc / "self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[int(thread)] = int(proc.joinpath("self/task", thread, "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
    return found or None


class Waiting:
    """The time for which a thread of the training was ready to run but waited for a core.

    The thread that waited longest counts: threads that compute together spin while they wait for each other, so that
    the first thread may never wait for a core. Only Linux counts this time.
    """

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._waits_s: dict[int, float] | None = None

    def begin(self) -> None:
        """Begin to count."""
        self._begun_s, self._waits_s = time.monotonic(), waits_s()

    def end(self, time_s: float) -> float | None:
        """Return the seconds waited since `begin`, as far as they are part of the measured `time_s`; None if unknown.

        A monitor's own clock may exclude the waiting, as a clock of CPU time does.
        """
        elapsed_s, waits = time.monotonic() - self._begun_s, waits_s()
        if waits is None or self._waits_s is None:
            return None
        found_s = max(waited - self._waits_s.get(thread, 0.0) for thread, waited in waits.items())
        return max(0.0, found_s - max(0.0, elapsed_s - time_s))


def gpu_is_used() -> bool:
    """Return whether PyTorch has started an accelerator in this process."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        return bool(
            torch.cuda.is_initialized()
            or torch.xpu.is_initialized()
            or (torch.backends.mps.is_available() and torch.mps.driver_allocated_memory())
        )
    except (AttributeError, RuntimeError):  # an older PyTorch, or a module that is being imported
        return False


def synchronize() -> None:
    """Wait for the work that this process has queued on its accelerator, so that the open window measures it."""
    torch = sys.modules.get("torch")
    if torch is None or not gpu_is_used():
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.xpu.is_initialized():
        torch.xpu.synchronize()
    else:
        torch.mps.synchronize()
