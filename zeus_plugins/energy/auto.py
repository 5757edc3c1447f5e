"""The choice of an energy monitor for this machine."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zeus_plugins.energy import nvml, rapl
from zeus_plugins.energy.estimate import EstimateMonitor, board_model
from zeus_plugins.energy.monitor import (
    DEFAULT_ESTIMATED_POWER_W,
    Choice,
    EnergyMonitor,
    EnergyUnavailableError,
    MonitorRequest,
    Probe,
    UnmeasuredGpuError,
    stated_power_w,
    warn_once,
)
from zeus_plugins.environment import ESTIMATED_POWER_W

_KFD = Path("/dev/kfd")
"""The file that AMD's driver shows if GPUs can compute."""


def probe_unread(request: MonitorRequest, *, model: str | None = None, kfd: Path = _KFD) -> Choice | None:
    """Raise the error of an AMD GPU or a Jetson module, which only Zeus's `ZeusMonitor` reads; see `Probe`.

    `model` replaces the model of this board, and `kfd` the file of AMD's driver.
    """
    board = board_model() if model is None else model
    is_module = "jetson" in board.lower()
    is_amd = not (request.gpu_is_seen or request.uses_no_gpu) and kfd.exists() and _has_rocm()
    if not (is_module or is_amd):
        return None
    device = f"the {board}" if is_module else "AMD GPUs"
    cause = (
        f"this package does not read the energy of {device}, but the ZeusMonitor of the package zeus does: pass"
        " energy_monitor=ZeusMonitor()"
    )
    if request.gpu_is_seen or request.uses_no_gpu:
        raise EnergyUnavailableError(cause)
    raise UnmeasuredGpuError(cause, model=board if is_module else None)


def _has_rocm() -> bool:
    """Return whether PyTorch, loaded or only installed, was built for AMD GPUs."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return bool(getattr(torch.version, "hip", None))
    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


PROBES: tuple[Probe, ...] = (nvml.probe, probe_unread, rapl.probe)
"""The probes of all kinds of devices, in order of preference. To support a new energy counter, add its `probe` here."""


def auto(
    estimated_power_w: float | None = None,
    *,
    device_indices: Sequence[int | str] | None = None,
    probes: Sequence[Probe] = PROBES,
) -> EnergyMonitor:
    """Choose the best monitor that this machine offers, and return it unused, so that it can be pickled.

    The order of preference: energy counters of NVIDIA GPUs; their power readings, integrated; energy counters of the
    CPU packages (RAPL), if the training uses no GPU; an estimate, labelled as an estimate. A choice less exact than a
    counter is logged as a warning, once per process; for AMD GPUs and Jetson modules, the warning names the monitor
    that reads them.

    Args:
        estimated_power_w: Watts of the whole machine at full load, for an estimate without a counter. None:
            ``ZEUS_ESTIMATED_POWER_W``, else the GPUs' power limits if known, else `DEFAULT_ESTIMATED_POWER_W`.
        device_indices: Indices among the visible GPUs, UUIDs of NVIDIA GPUs, or the kind of another accelerator, such
            as "xpu". None: all visible GPUs. Empty: the training uses no GPU, so that idle GPUs are not measured.
        probes: The kinds of devices to look for, in this order.

    Raises:
        ZeusBSOConfigError: The visible GPUs cannot be measured together, or the stated watts are invalid.
    """
    choice = choose(estimated_power_w, device_indices=device_indices, probes=probes)
    if choice.warning is not None:
        warn_once(f"{choice.warning}{' (why: zeus-plugins doctor)' * isinstance(choice.monitor, EstimateMonitor)}")
    return choice.monitor


def choose(
    estimated_power_w: float | None = None,
    *,
    device_indices: Sequence[int | str] | None = None,
    probes: Sequence[Probe] = PROBES,
) -> Choice:
    """Choose a monitor like `auto`; return it with the reasons for the choice."""
    request = MonitorRequest(device_indices, estimated_power_w)
    causes: list[str] = []
    gpus = UnmeasuredGpuError("no GPU was found")
    for probe in probes:
        try:
            found = probe(request)
        except EnergyUnavailableError as unavailable:
            causes.append(unavailable.cause)
            if isinstance(unavailable, UnmeasuredGpuError):
                gpus, request = unavailable, replace(request, gpu_is_seen=True)
        else:
            if found is not None:
                return replace(found, causes=(*causes, *found.causes))
    return _estimate(request, gpus, causes)


def _estimate(request: MonitorRequest, gpus: UnmeasuredGpuError, causes: Sequence[str]) -> Choice:
    stated_w = stated_power_w(request.estimated_power_w)
    if stated_w is not None:
        power_w, basis = stated_w, "stated"
    elif gpus.max_power_w is not None:
        power_w, basis = gpus.max_power_w, gpus.basis
    else:
        power_w, basis = DEFAULT_ESTIMATED_POWER_W, "assumed"
    model = gpus.model
    if model is None and request.trains_on_gpu:
        model = _cuda_model()
    estimate = EstimateMonitor(
        power_w,
        number_of_devices=gpus.number,
        device_model=model,
        basis=basis,
        on_cpu=False if request.trains_on_gpu else None,
    )
    method = "CPU time / cores" if "CPU time" in estimate.source else "time"
    watts = "" if basis == "stated" else f"; {ESTIMATED_POWER_W} states your machine's watts at full load"
    # On a GPU, a missing library or right can be mended.
    missing = f"{'; '.join(causes)}: " if request.trains_on_gpu else ""
    warning = f"{missing}energy is estimated as {power_w:g} W × {method}, not measured{watts}"
    return Choice(estimate, tuple(causes), warning)


def _cuda_model() -> str | None:
    """Return PyTorch's name of the first GPU, or None if PyTorch has not started CUDA."""
    torch = sys.modules.get("torch")
    try:
        return str(torch.cuda.get_device_properties(0).name) if torch and torch.cuda.is_initialized() else None
    except (AttributeError, RuntimeError, AssertionError):
        return None
