"""NVIDIA GPUs with an energy counter (Volta and later)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zeus_plugins.energy.counters import CounterMonitor
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.energy.nvml_gpus import Nvml, NvmlGpu, describe_gpus, open_gpus, with_stated_power
from zeus_plugins.energy.nvml_notes import NvmlNotes
from zeus_plugins.protocol import GpuConfig


class NvmlMonitor(CounterMonitor):
    """An `EnergyMonitor` over the visible NVIDIA GPUs, by their energy counters.

    The driver is first asked when `gpus` or `begin_window` is called. Where PyTorch has started CUDA by then, its GPUs
    are found by their UUIDs. Otherwise ``CUDA_VISIBLE_DEVICES`` is read, whose indices are taken to count by PCI bus,
    so a machine with GPUs of several models has to set ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` for CUDA to count alike.
    GPUs that this process may not open are none of its own: neither CUDA nor this monitor counts them.

    The counters move every few tens of milliseconds, so that is how exactly a window's ends are met.

    Args:
        device_indices: Which of the visible GPUs train, counting from 0; or GPUs of this machine by their UUIDs. None:
            all that are visible.
        max_power_w: The most that they draw together, in watts, should a driver tell no power limit, as on many
            laptops.
        nvml: What to call instead of the installed `pynvml`.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, one that cannot be opened, or one without a
            counter of its own. From `gpus`: a driver tells no power limit, and nobody states one.
        ZeusBSOConfigError: On first use: the GPUs are of several models, or one that was named does not exist.
    """

    def __init__(
        self,
        device_indices: Sequence[int | str] | None = None,
        *,
        max_power_w: float | None = None,
        nvml: Nvml | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("nvml", clock)
        self._notes = NvmlNotes(())  # until the GPUs are found
        self._max_power_w = max_power_w
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._nvml = nvml

    def end_window(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; the source tells the scope of a superchip, and that others share the GPUs."""
        return self._notes.on(super().end_window(name))

    def _find(self) -> tuple[Sequence[NvmlGpu], Callable[[], GpuConfig]]:
        gpus = with_stated_power(open_gpus(self._nvml, self._device_indices), self._max_power_w)
        for gpu in gpus:
            gpu.energy_uj()  # It has a counter, or this raises.
        self._notes = NvmlNotes(gpus)
        return gpus, lambda: describe_gpus(gpus)
