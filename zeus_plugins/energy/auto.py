"""The choice of a monitor for this machine."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.energy.amd import AmdSmi, AmdSmiMonitor, AmdSmiPowerMonitor
from zeus_plugins.energy.estimate import EstimateMonitor
from zeus_plugins.energy.integrated import IntegratedPowerMonitor
from zeus_plugins.energy.jetson import HWMON, JetsonMonitor
from zeus_plugins.energy.monitor import EnergyMonitor, EnergyUnavailableError, NoGpuError, NoPowerLimitError
from zeus_plugins.energy.nvml import NvmlMonitor
from zeus_plugins.energy.nvml_gpus import Nvml, open_gpus, portrait_of
from zeus_plugins.energy.nvml_power import NvmlPowerMonitor
from zeus_plugins.energy.rapl import POWERCAP, RaplMonitor
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
    device_indices: Sequence[int | str] | None = None,
    nvml: Nvml | None = None,
    amdsmi: AmdSmi | None = None,
    powercap: Path = POWERCAP,
    hwmon: Path = HWMON,
) -> EnergyMonitor:
    """Choose the best monitor that this machine offers.

    In this order: the energy counters of NVIDIA's GPUs; their power, integrated; the counters of AMD's GPUs; the power
    sensors of a Jetson module; where no GPU trains, the counters of the CPU packages (RAPL); and where nothing is
    measured, an estimate that says so.

    A fallback is logged as a warning, once per process for each cause. The monitor returned is unused and can be
    pickled.

    Args:
        estimated_power_w: Watts to assume without a counter. None: those in the environment variable
            ``ZEUS_ESTIMATED_POWER_W``, else the GPUs' power limits where they tell them, else
            `DEFAULT_ESTIMATED_POWER_W`.
        device_indices: Which of the visible GPUs train, counting from 0, or NVIDIA GPUs by their UUIDs. None: all of
            them. Empty: none, the training uses another device, so that an idle GPU beside it must not be measured.
        nvml: What to call instead of the installed `pynvml`.
        amdsmi: What to call instead of the installed `amdsmi`.
        powercap: Where Linux shows the CPU packages' counters.
        hwmon: Where Linux shows the power sensors of a Jetson module.

    Raises:
        ZeusBSOConfigError: The visible GPUs cannot be measured together, or the watts to assume make no sense.
    """
    choice = choose(
        estimated_power_w, device_indices=device_indices, nvml=nvml, amdsmi=amdsmi, powercap=powercap, hwmon=hwmon
    )
    if choice.warning is not None:
        _warn_once(choice.warning)
    return choice.monitor


def choose(
    estimated_power_w: float | None = None,
    *,
    device_indices: Sequence[int | str] | None = None,
    nvml: Nvml | None = None,
    amdsmi: AmdSmi | None = None,
    powercap: Path = POWERCAP,
    hwmon: Path = HWMON,
) -> Choice:
    """Choose as `auto` does, and say why. Arguments and errors are those of `auto`."""
    causes: list[str] = []
    monitor = None
    if device_indices is not None and not device_indices:
        causes.append("the training uses no GPU")
        trains_on_gpu = False
    else:
        found, trains_on_gpu = _gpu_monitor(device_indices, nvml, amdsmi, causes, estimated_power_w)
        if found is not None and found.warning is not None:
            return found
        monitor = None if found is None else found.monitor
    if isinstance(monitor, IntegratedPowerMonitor):
        warning = f"{causes[-1]}: energy is integrated from power readings instead, which is less exact."
        return Choice(monitor, tuple(causes), warning)
    if monitor is not None:
        return Choice(monitor, tuple(causes))
    try:
        return _jetson_choice(hwmon, estimated_power_w, causes)
    except EnergyUnavailableError as unavailable:
        if trains_on_gpu:
            logger.debug("%s", unavailable.cause)
    if not trains_on_gpu:
        try:
            return _rapl_choice(powercap, estimated_power_w, causes)
        except EnergyUnavailableError as unavailable:
            causes.append(unavailable.cause)
    # Those that cannot be measured may at least tell what they are.
    gpus = portrait_of(nvml, device_indices) if trains_on_gpu else None
    stated_w = stated_power_w(estimated_power_w)
    if stated_w is not None:
        power_w, basis = stated_w, "stated"
    elif gpus is not None and gpus.max_power_w is not None:
        power_w, basis = gpus.max_power_w, gpus.basis
    else:
        power_w, basis = DEFAULT_ESTIMATED_POWER_W, "assumed"
    number, model = (1, _cuda_model() if trains_on_gpu else None) if gpus is None else (len(gpus.names), gpus.names[0])
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
    device_indices: Sequence[int | str] | None,
    nvml: Nvml | None,
    amdsmi: AmdSmi | None,
    causes: list[str],
    estimated_power_w: float | None,
) -> tuple[Choice | None, bool]:
    """The monitor for the GPUs, or None, and whether any train; adds to the causes."""
    ways: list[Callable[[float | None], EnergyMonitor]] = [
        lambda max_power_w: NvmlMonitor(device_indices, max_power_w=max_power_w, nvml=nvml),
        lambda max_power_w: NvmlPowerMonitor(device_indices, max_power_w=max_power_w, nvml=nvml),
    ]
    try:
        open_gpus(nvml, device_indices)
    except NoGpuError as none:
        causes.append(none.cause)
        places = None if device_indices is None else [each for each in device_indices if isinstance(each, int)]
        is_nvidia = places is not None and len(places) < len(device_indices or ())
        if is_nvidia or (amdsmi is None and importlib.util.find_spec("amdsmi") is None):
            return None, bool(device_indices)
        ways = [
            lambda max_power_w: AmdSmiMonitor(places, max_power_w=max_power_w, amdsmi=amdsmi),
            lambda max_power_w: AmdSmiPowerMonitor(places, max_power_w=max_power_w, amdsmi=amdsmi),
        ]
    except EnergyUnavailableError as unavailable:
        causes.append(unavailable.cause)
        return None, True
    has_gpu = bool(device_indices)  # Those who name GPUs train on them, whatever their driver says.
    for make in ways:
        try:
            make(None).gpus()
        except NoPowerLimitError as unavailable:  # It counts all the same.
            power_w = stated_power_w(estimated_power_w) or DEFAULT_ESTIMATED_POWER_W
            return Choice(make(power_w), tuple(causes), _stand_in(unavailable, power_w)), True
        except EnergyUnavailableError as unavailable:
            causes.append(unavailable.cause)
            has_gpu = has_gpu or not isinstance(unavailable, NoGpuError)
        else:
            return Choice(make(None), tuple(causes)), True
    return None, has_gpu


def _jetson_choice(hwmon: Path, estimated_power_w: float | None, causes: list[str]) -> Choice:
    try:
        JetsonMonitor(root=hwmon).gpus()
    except NoPowerLimitError as unavailable:
        power_w = stated_power_w(estimated_power_w) or DEFAULT_ESTIMATED_POWER_W
        return Choice(JetsonMonitor(root=hwmon, max_power_w=power_w), tuple(causes), _stand_in(unavailable, power_w))
    raise AssertionError("a Jetson's sensors tell no power limit")


def _rapl_choice(powercap: Path, estimated_power_w: float | None, causes: list[str]) -> Choice:
    monitor = RaplMonitor(root=powercap)
    try:
        monitor.gpus()
    except EnergyUnavailableError as unavailable:
        power_w = stated_power_w(estimated_power_w) or DEFAULT_ESTIMATED_POWER_W
        RaplMonitor(root=powercap, max_power_w=power_w).gpus()  # Raises unless the limit was all that was missing.
        warning = _stand_in(unavailable, power_w)
        return Choice(RaplMonitor(root=powercap, max_power_w=power_w), tuple(causes), warning)
    return Choice(RaplMonitor(root=powercap), tuple(causes))


def _stand_in(unavailable: EnergyUnavailableError, power_w: float) -> str:
    return (
        f"{unavailable.cause}: {power_w:g} W is taken for the most that it draws. Set {ESTIMATED_POWER_W} to the"
        " watts of its data sheet (TDP)."
    )


def _cuda_model() -> str | None:
    """The GPU's name as PyTorch gives it, where the driver tells nothing."""
    torch = sys.modules.get("torch")
    try:
        return str(torch.cuda.get_device_properties(0).name) if torch and torch.cuda.is_initialized() else None
    except (AttributeError, RuntimeError, AssertionError):
        return None


def stated_power_w(power_w: float | None = None) -> float | None:
    """These watts, else those in the environment variable ``ZEUS_ESTIMATED_POWER_W``, else None."""
    return ESTIMATED_POWER_W.number(is_positive=True) if power_w is None else power_w


@functools.cache  # a recurring cause is told once
def _warn_once(warning: str) -> None:
    logger.warning("%s", warning)
