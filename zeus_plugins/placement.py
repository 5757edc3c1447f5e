"""The machines of a training and their GPUs, as its processes tell each other. Knows no framework."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zeus_plugins.environment import GROUP_RANK

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_logger = logging.getLogger("zeus_plugins")


class Neighbours(Protocol):
    """The processes of a training, as far as they can be placed."""

    @property
    def rank(self) -> int:
        """The rank of this process among all."""

    @property
    def local_rank(self) -> int:
        """Its rank among those of its machine, as its launcher says; 0 where that says nothing."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def machine(self) -> str:
        """The identity of this machine among the others."""

    @property
    def gpu_indices(self) -> Sequence[int]:
        """The GPUs of this machine that train, as indices into the visible ones; none on another accelerator."""

    @property
    def own_gpus(self) -> Sequence[str]:
        """The UUIDs of the GPUs that this process trains on, as far as CUDA has started and tells them."""

    def all_gather(self, thing: Any) -> list[Any]:
        """Return what each rank passes, in order of rank; every rank makes this call."""


@dataclass(frozen=True)
class Placement:
    """The place of one process.

    Attributes:
        is_first: True on the first process of each machine, which measures it.
        machines: Number of machines.
        gpus: The GPUs of this machine that train, over all its processes: UUIDs, or indices into the visible ones.
    """

    is_first: bool
    machines: int
    gpus: Sequence[int | str]


@dataclass(frozen=True)
class _Seat:
    """One process, as all hear of it."""

    machine: str
    gpus: tuple[str, ...]


def placed(ranks: Neighbours) -> Placement:
    """Find out which processes share a machine, and which GPUs theirs are. A collective call of all processes.

    Launchers do not agree on the variables that say so (``deepspeed``, ``mpirun`` and ``srun`` set no
    ``LOCAL_WORLD_SIZE``), and a process may see its own GPU alone.
    """
    if ranks.world_size == 1:
        return Placement(is_first=True, machines=1, gpus=ranks.gpu_indices)
    try:
        seats: list[_Seat] = ranks.all_gather(_Seat(ranks.machine, tuple(ranks.own_gpus)))
    except (NotImplementedError, RuntimeError, ValueError) as error:  # no process group of PyTorch, on every rank alike
        _logger.debug("the processes cannot tell each other where they are: %s", error)
        return Placement(is_first=ranks.local_rank == 0, machines=1, gpus=ranks.gpu_indices)
    here = [seat for seat in seats if seat.machine == ranks.machine]
    union = tuple(dict.fromkeys(uuid for seat in here for uuid in seat.gpus))
    return Placement(
        is_first=seats.index(next(seat for seat in seats if seat.machine == ranks.machine)) == ranks.rank,
        machines=len({seat.machine for seat in seats}),
        # Fewer GPUs than processes: they have not chosen theirs yet, or the GPUs are not known.
        gpus=union if len(union) >= len(here) else ranks.gpu_indices,
    )


def this_machine(boot_id: Path = BOOT_ID) -> str:
    """The name of this machine in the training: one start of one kernel, one container, one agent of ``torchrun``."""
    try:
        started = boot_id.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # other systems than Linux
        started = ""
    return "/".join((started, platform.node(), GROUP_RANK.text() or ""))
