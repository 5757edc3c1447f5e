"""As much of PyTorch as a program needs that waits for its GPUs, for GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace

__version__ = "0"


def _synchronize(_device: int | None = None) -> None:
    pass


cuda = SimpleNamespace(is_available=lambda: True, synchronize=_synchronize)
