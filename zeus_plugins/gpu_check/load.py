"""Work for a GPU while it is looked at, by PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

BURST_S = 0.2
"""Seconds of work, and of rest, in bursts."""

_SIZE = 4096
_CALLS = 200


class Load(Protocol):
    """Keeps one GPU busy."""

    def problem(self) -> str | None:
        """The reason for which there is no such work; None where there is."""
        ...

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """Work meanwhile: not at all (``idle``), all the time (``load``), or on and off (``bursts``)."""
        ...

    def queued(self) -> tuple[float, float]:
        """Seconds until the calls of some work had returned, and until the work was done."""
        ...


class TorchLoad:
    """Multiplies matrices on the GPU with this UUID, if PyTorch is installed."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._torch: Any = None
        with contextlib.suppress(ImportError, OSError):
            self._torch = importlib.import_module("torch")

    def problem(self) -> str | None:
        """See `Load.problem`."""
        if self._torch is None or not self._torch.cuda.is_available():
            return "PyTorch with CUDA is not installed, so there is nothing to load the GPU with"
        return None if self._device() is not None else "CUDA does not show this GPU to PyTorch"

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """See `Load.running`."""
        if phase == "idle":
            yield
            return
        stopped = threading.Event()
        worker = threading.Thread(target=self._work, args=(phase, stopped), name="zeus-gpu-load", daemon=True)
        worker.start()
        try:
            yield
        finally:
            stopped.set()
            worker.join()

    def queued(self) -> tuple[float, float]:
        """See `Load.queued`."""
        matrix = self._matrix()
        self._multiply(matrix, 1)
        begun_s = time.monotonic()
        for _ in range(_CALLS):
            matrix @ matrix
        returned_s = time.monotonic()
        self._torch.cuda.synchronize(matrix.device)
        return returned_s - begun_s, time.monotonic() - begun_s

    def _work(self, phase: str, stopped: threading.Event) -> None:
        matrix = self._matrix()
        while not stopped.is_set():
            end_s = time.monotonic() + BURST_S
            while time.monotonic() < end_s:
                self._multiply(matrix, 1)
            if phase == "bursts":
                stopped.wait(BURST_S)

    def _multiply(self, matrix: Any, times: int) -> None:
        for _ in range(times):
            matrix @ matrix
        self._torch.cuda.synchronize(matrix.device)

    def _matrix(self) -> Any:
        return self._torch.rand(_SIZE, _SIZE, device=self._device())

    def _device(self) -> Any:
        from zeus_plugins.energy.visible import cuda_devices

        self._torch.cuda.init()
        known = cuda_devices(self._torch) or ()
        places = [place for place, uuid in enumerate(known) if self._uuid.removeprefix("GPU-") == uuid]
        return self._torch.device("cuda", places[0]) if places else None
