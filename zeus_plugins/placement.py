"""Machines of a training and their GPUs, found by exchange between its processes; independent of frameworks."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zeus_plugins.environment import GROUP_RANK

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_logger = logging.getLogger("zeus_plugins")


class Ranks(Protocol):
    """The processes of a training, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Number of this process among all processes."""

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine by its launcher, or 0."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def machine(self) -> str:
        """Identity of this machine (`this_machine`)."""

    @property
    def gpu_indices(self) -> Sequence[int | str] | None:
        """Indices, into the visible GPUs, of the GPUs here that train; the kind of another accelerator; None: all."""

    @property
    def own_gpus(self) -> Sequence[str]:
        """UUIDs of the GPUs that this process trains on; empty if it has not chosen any, or they are unknown."""

    def all_gather(self, thing: Any) -> list[Any]:
        """Return the argument of each rank, in order of rank; all ranks make this call."""


@dataclass(frozen=True)
class Placement:
    """Place of one process.

    Attributes:
        is_first: Whether this is the first process of its machine, which measures the machine.
        machines: Number of machines.
        gpus: GPUs of this machine that train, over all its processes: UUIDs, or indices into the visible GPUs; or all.
        processes: Ids of the training's processes on this machine; empty if unknown, or if there is only this one.
    """

    is_first: bool
    machines: int
    gpus: Sequence[int | str] | None
    processes: Sequence[int] = ()


def placed(ranks: Ranks) -> Placement:
    """Find the processes that share a machine, and the GPUs that they train on; all processes make this call.

    The launchers' variables do not suffice: ``deepspeed``, ``mpirun`` and ``srun`` set no ``LOCAL_WORLD_SIZE``, and a
    process may see only its own GPU.
    """
    if ranks.world_size == 1:
        return Placement(is_first=True, machines=1, gpus=ranks.gpu_indices)
    try:
        gathered: list[tuple[str, Sequence[str], int]] = ranks.all_gather(
            (ranks.machine, tuple(ranks.own_gpus), os.getpid())
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:  # no process group, on any rank
        _logger.debug("the processes cannot tell each other where they are: %s", error)
        return Placement(is_first=ranks.local_rank == 0, machines=1, gpus=ranks.gpu_indices)
    machines = [machine for machine, _, _ in gathered]
    here = [gpus for machine, gpus, _ in gathered if machine == ranks.machine]
    union = tuple(dict.fromkeys(uuid for gpus in here for uuid in gpus))
    return Placement(
        is_first=machines.index(ranks.machine) == ranks.rank,
        machines=len(set(machines)),
        gpus=union if all(here) else ranks.gpu_indices,
        processes=tuple(process for machine, _, process in gathered if machine == ranks.machine),
    )


def process_start(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the time at which a process started, as Linux writes it; None if the process has ended.

    The start tells apart two processes that had the same id. On other systems, each process counts as ended.
    """
    try:
        fields = proc.joinpath(str(pid), "stat").read_bytes().rpartition(b")")[2].decode().split()
        return None if fields[0] in ("Z", "X") else fields[19]  # Z: killed, and not yet waited for by its parent
    except (OSError, IndexError):
        return None


def this_machine(boot_id: Path = BOOT_ID) -> str:
    """Return the identity of this machine: kernel start, host name (or container) and agent of ``torchrun``."""
    try:
        started = boot_id.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # other systems than Linux
        started = ""
    return "/".join((started, platform.node(), GROUP_RANK.text() or ""))
