"""Monitors with the interface of Zeus's ZeusMonitor."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FakeZeusMeasurement:
    """The fields of Zeus's Measurement."""

    time: float = 2.0
    gpu_energy: dict[int, float] = field(default_factory=lambda: {0: 30.0, 1: 12.5})
    cpu_energy: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None

    @property
    def total_energy(self) -> float:
        """Sum the energy of only the GPUs, as Zeus does."""
        return sum(self.gpu_energy.values())


class FakeZeusMonitor:
    """Monitor with an attribute `gpus` and arguments that our monitors lack."""

    gpus: object = object()
    soc_is_present = False

    def __init__(self, *answers: object, gpu_indices: list[int] | None = None) -> None:
        self.answers = list(answers) or [FakeZeusMeasurement()]
        self.gpu_indices = [0] if gpu_indices is None else gpu_indices
        self.open: set[str] = set()

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        assert sync_execution
        if key in self.open:
            raise ValueError(f"Measurement window '{key}' already exists")
        self.open.add(key)

    def end_window(self, key: str, sync_execution: bool = True, cancel: bool = False) -> object:
        assert sync_execution
        assert not cancel
        self.open.remove(key)
        return self.answers.pop(0)
