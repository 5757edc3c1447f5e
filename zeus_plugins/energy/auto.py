"""The choice of a monitor for this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.energy.amd import AmdSmi, AmdSmiMonitor
from zeus_plugins.energy.estimate import EstimateMonitor
from zeus_plugins.energy.monitor import EnergyMonitor, EnergyUnavailableError, NoGpuError
from zeus_plugins.energy.nvml import Nvml, NvmlMonitor, describe_gpus, open_gpus
from zeus_plugins.energy.nvml_power import NvmlPowerMonitor
from zeus_plugins.energy.rapl import POWERCAP, RaplMonitor
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.environment import ESTIMATED_POWER_W

logger = logging.getLogger("zeus_plugins.energy")

DEFAULT_ESTIMATED_POWER_W = 65.0
"""Watts assumed where nothing is measured and nobody states better ones.

65 W is the usual thermal design power class of a desktop CPU package (and of a share of a server's): the right order of
magnitude for a training on a CPU, and a convention rather than a measurement.
"""


@dataclass(frozen=True)
class Choice:
    """An unused monitor, and why it is this one and none of those before it in the order of preference."""

    monitor: EnergyMonitor
    causes: tuple[str, ...] = ()
    warning: str | None = None


def auto(
    estimated_power_w: float | None = None,
    *,
    device_indices: Sequence[int] | None = None,
    nvml: Nvml | None = None,
    amdsmi: AmdSmi | None = None,
    powercap: Path = POWERCAP,
) -> EnergyMonitor:
    """Choose the best monitor that this machine offers.

    In this order: the energy counters of NVIDIA's GPUs; their power, integrated; the counters of AMD's GPUs; where no
    GPU trains, the counters of the CPU packages (RAPL); and where nothing is measured, an estimate that says so.

    A fallback is logged as a warning, once per process for each cause. The monitor returned is unused and can be
    pickled.

    Args:
        estimated_power_w: Watts to assume without a counter. None: those in the environment variable
            ``ZEUS_ESTIMATED_POWER_W``, else the GPUs' power limits where they tell them, else
            `DEFAULT_ESTIMATED_POWER_W`.
        device_indices: Which of the visible GPUs train, counting from 0. None: all of them. Empty: none, the training
            uses another device, so that an idle GPU beside it must not be measured.
        nvml: What to call instead of the installed `pynvml`.
        amdsmi: What to call instead of the installed `amdsmi`.
        powercap: Where Linux shows the CPU packages' counters.

    Raises:
        ZeusBSOConfigError: The visible GPUs cannot be measured together, or the watts to assume make no sense.
    """
    choice = choose(estimated_power_w, device_indices=device_indices, nvml=nvml, amdsmi=amdsmi, powercap=powercap)
    if choice.warning is not None:
        _warn_once(choice.warning)
    return choice.monitor


def choose(
    estimated_power_w: float | None = None,
    *,
    device_indices: Sequence[int] | None = None,
    nvml: Nvml | None = None,
    amdsmi: AmdSmi | None = None,
    powercap: Path = POWERCAP,
) -> Choice:
    """Choose as `auto` does, and say why. Arguments and errors are those of `auto`."""
    causes: list[str] = []
    monitor = None
    if device_indices is not None and not device_indices:
        causes.append("the training uses no GPU")
        trains_on_gpu = False
    else:
        monitor, trains_on_gpu = _gpu_monitor(device_indices, nvml, amdsmi, causes)
    if isinstance(monitor, NvmlPowerMonitor):
        warning = f"{causes[-1]}: energy is integrated from power readings instead, which is less exact."
        return Choice(monitor, tuple(causes), warning)
    if monitor is not None:
        return Choice(monitor, tuple(causes))
    if not trains_on_gpu:
        try:
            return _rapl_choice(powercap, estimated_power_w, causes)
        except EnergyUnavailableError as unavailable:
            causes.append(unavailable.cause)
    gpus: GpuConfig | None = None
    if trains_on_gpu:
        # Those that cannot be measured may at least tell what they are.
        with contextlib.suppress(EnergyUnavailableError):
            gpus = describe_gpus(open_gpus(nvml, device_indices))
    stated_w = stated_power_w(estimated_power_w)
    if stated_w is not None:
        power_w, basis = stated_w, "stated"
    else:
        power_w, basis = (DEFAULT_ESTIMATED_POWER_W, "assumed") if gpus is None else (gpus.max_power, "by power limit")
    number, model = (1, None) if gpus is None else (gpus.number_of_gpus, gpus.gpu_model)
    estimate = EstimateMonitor(power_w, number_of_devices=number, device_model=model, basis=basis)
    warning = (
        f"No energy counter found ({'; '.join(causes)}): energy is estimated as {power_w:g} W × time, not measured."
    )
    if basis != "stated":
        warning += (
            f" State the watts that this machine really draws by the environment variable {ESTIMATED_POWER_W} or by"
            " energy_monitor=EstimateMonitor(power_w=...)."
        )
    return Choice(estimate, tuple(causes), warning)


def _gpu_monitor(
    device_indices: Sequence[int] | None, nvml: Nvml | None, amdsmi: AmdSmi | None, causes: list[str]
) -> tuple[EnergyMonitor | None, bool]:
    """The monitor for the GPUs, or None, and whether any train; adds to the causes."""
    ways: list[Callable[[], EnergyMonitor]] = [
        lambda: NvmlMonitor(device_indices, nvml=nvml),
        lambda: NvmlPowerMonitor(device_indices, nvml=nvml),
    ]
    try:
        open_gpus(nvml, device_indices)
    except NoGpuError as none:
        causes.append(none.cause)
        if amdsmi is None and importlib.util.find_spec("amdsmi") is None:
            return None, bool(device_indices)
        ways = [lambda: AmdSmiMonitor(device_indices, amdsmi=amdsmi)]
    except EnergyUnavailableError as unavailable:
        causes.append(unavailable.cause)
        return None, True
    has_gpu = bool(device_indices)  # Those who name GPUs train on them, whatever their driver says.
    for make in ways:
        try:
            make().gpus()
        except EnergyUnavailableError as unavailable:
            causes.append(unavailable.cause)
            has_gpu = has_gpu or not isinstance(unavailable, NoGpuError)
        else:
            return make(), True
    return None, has_gpu


def _rapl_choice(powercap: Path, estimated_power_w: float | None, causes: list[str]) -> Choice:
    monitor = RaplMonitor(root=powercap)
    try:
        monitor.gpus()
    except EnergyUnavailableError as unavailable:
        power_w = stated_power_w(estimated_power_w) or DEFAULT_ESTIMATED_POWER_W
        RaplMonitor(root=powercap, max_power_w=power_w).gpus()  # Raises unless the limit was all that was missing.
        warning = (
            f"{unavailable.cause}: {power_w:g} W is taken for the most that it draws. Set {ESTIMATED_POWER_W} to the"
            " watts of its data sheet (TDP)."
        )
        return Choice(RaplMonitor(root=powercap, max_power_w=power_w), tuple(causes), warning)
    return Choice(RaplMonitor(root=powercap), tuple(causes))


def stated_power_w(power_w: float | None = None) -> float | None:
    """These watts, else those in the environment variable ``ZEUS_ESTIMATED_POWER_W``, else None."""
    return ESTIMATED_POWER_W.number(is_positive=True) if power_w is None else power_w


@functools.cache  # a recurring cause is told once
def _warn_once(warning: str) -> None:
    logger.warning("%s", warning)
