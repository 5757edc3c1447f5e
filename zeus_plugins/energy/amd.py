"""Energy of AMD GPUs, read by the package `amdsmi`, which comes with ROCm.

Based on the interface of amdsmi 7.0.2 and on reports of its users, and tested only with a simulated GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zeus_plugins.energy.counters import MICRO, CounterMonitor, Found, IntegratedPowerMonitor
from zeus_plugins.energy.monitor import (
    Choice,
    EnergyUnavailableError,
    MonitorRequest,
    NoGpuError,
    NoPowerLimitError,
    UnmeasuredGpuError,
)
from zeus_plugins.energy.visible import check_one_model, chosen_indices
from zeus_plugins.environment import CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES

AmdSmi = Any
"""The package `amdsmi`, which may be absent, or a replacement in a test."""

COMPARED_S = 0.25
"""Seconds between two readings of a counter whose rate is compared with the power reading, on first use."""

# Bounds of counted power / read power. They are wide, as both are means over different times, and find a wrong unit.
_PLAUSIBLE = (0.1, 10.0)


def probe(request: MonitorRequest, amdsmi: AmdSmi | None = None) -> Choice | None:
    """Choose a monitor of the AMD GPUs, unless the training uses other devices; see `Probe`."""
    indices = [each for each in request.device_indices or () if isinstance(each, int)]
    names_others = len(indices) < len(request.device_indices or ())
    is_absent = amdsmi is None and importlib.util.find_spec("amdsmi") is None
    if request.gpu_is_seen or request.uses_no_gpu or names_others or is_absent:
        return None
    try:
        _open_gpus(amdsmi, indices or None)
        return request.counted_or_integrated(
            partial(AmdSmiMonitor, indices or None, amdsmi=amdsmi),
            partial(AmdSmiPowerMonitor, indices or None, amdsmi=amdsmi),
        )
    except NoGpuError:
        raise
    except EnergyUnavailableError as unavailable:
        raise UnmeasuredGpuError(unavailable.cause) from unavailable


class AmdSmiMonitor(CounterMonitor):
    """An `EnergyMonitor` over the visible AMD GPUs. Experimental: not yet tested on a real GPU.

    `gpus` and `begin_window` open the driver and read ``ROCR_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES`` and
    ``CUDA_VISIBLE_DEVICES``. The first use compares each counter with the power reading, if available, because some
    driver versions count in another unit than they state.

    On a card with two dies (MI250), the first die's counter counts the energy of both dies, and the second die's stays
    at 0. Such a card can be measured only if the training uses both dies.

    Args:
        device_indices: Indices among the visible GPUs. None: all of them.
        max_power_w: Summed maximum power of the GPUs in watts, used if the driver gives no power limit.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, a GPU without a counter of its own, or a
            counter whose rate differs from the power reading by more than a factor of ten.
        ZeusBSOConfigError: On first use: the GPUs are of several models, or a named GPU does not exist.
    """

    def __init__(
        self,
        device_indices: Sequence[int] | None = None,
        *,
        max_power_w: float | None = None,
        amdsmi: AmdSmi | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        find = partial(_counting, amdsmi, device_indices, clock, sleep)
        super().__init__("amdsmi", find, clock, max_power_w=max_power_w, sleep=sleep)


class AmdSmiPowerMonitor(IntegratedPowerMonitor):
    """An `EnergyMonitor` that integrates power readings of the visible AMD GPUs, for GPUs with unusable counters.

    Experimental. It has the arguments and errors of `AmdSmiMonitor`. A GPU without a power reading, such as the second
    die of an MI250, raises `EnergyUnavailableError`.
    """

    def __init__(
        self,
        device_indices: Sequence[int] | None = None,
        *,
        interval_s: float | None = None,
        max_power_w: float | None = None,
        amdsmi: AmdSmi | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("amdsmi power", partial(_readable, amdsmi, device_indices), clock, interval_s, max_power_w)


@dataclass(frozen=True)
class _Gpu:
    """One GPU, or one die of a card with two; `index` is its number on the machine in HIP's order."""

    amdsmi: AmdSmi
    handle: Any
    index: int
    name: str
    uuid: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def max_power_w(self) -> float:
        """The highest settable power limit in watts; amdsmi gives microwatts or, in some versions, watts."""
        try:
            limits = self._ask("power limits", self.amdsmi.amdsmi_get_power_cap_info)
            limit = self._number("power limits", limits, "max_power_cap")
            return limit if limit < MICRO else limit / MICRO  # no limit is below 1 W, or above a megawatt
        except EnergyUnavailableError as unavailable:
            raise NoPowerLimitError(unavailable.cause) from unavailable

    def power_w(self) -> float:
        """Read the power in watts, from the first field that has a value on this model."""
        told = self._ask("power reading", self.amdsmi.amdsmi_get_power_info)
        for key in ("socket_power", "current_socket_power", "average_socket_power"):
            number = told.get(key)
            if isinstance(number, int | float) and number > 0:
                return float(number)
        raise EnergyUnavailableError(f"{self} gives no power reading: amdsmi answers {dict(told)!r}")

    def energy_uj(self) -> int:
        count = self._ask("energy counter", self.amdsmi.amdsmi_get_energy_count)
        key = "energy_accumulator" if "energy_accumulator" in count else "power"  # "power" before ROCm 6.2
        return round(
            self._number("energy counter", count, key) * self._number("energy counter", count, "counter_resolution")
        )

    def _ask(self, what: str, question: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        try:
            return question(self.handle)
        except self.amdsmi.AmdSmiException as error:
            raise EnergyUnavailableError(f"{self} gives no {what}: {error}") from error

    def _number(self, what: str, answer: Mapping[str, Any], key: str) -> float:
        number = answer.get(key)
        if not isinstance(number, int | float):  # amdsmi returns "N/A"
            raise EnergyUnavailableError(f"{self} gives no {what}: amdsmi answers {key}={number!r}")
        return number


def _counting(
    amdsmi: AmdSmi | None, indices: Sequence[int] | None, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Found:
    gpus, machine = _open_gpus(amdsmi, indices)
    counting = _first_dies(gpus, machine)
    _compare(counting, clock, sleep)
    return Found(counting, len(gpus), gpus[0].name)


def _readable(amdsmi: AmdSmi | None, indices: Sequence[int] | None) -> Found:
    gpus, _machine = _open_gpus(amdsmi, indices)
    return Found(gpus, len(gpus), gpus[0].name)


def _compare(gpus: Sequence[_Gpu], clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Raise `EnergyUnavailableError` if a counter disagrees with its GPU's power reading, if there is a reading."""
    readings = []
    for gpu in gpus:
        with contextlib.suppress(EnergyUnavailableError, AttributeError):
            readings.append((gpu, gpu.power_w(), gpu.energy_uj(), clock()))
    if readings:
        sleep(COMPARED_S)
    for gpu, power_w, begun_uj, begun_s in readings:
        counted_w = (gpu.energy_uj() - begun_uj) / MICRO / max(clock() - begun_s, 1e-9)
        lowest, highest = _PLAUSIBLE
        if not lowest * power_w <= counted_w <= highest * power_w:
            raise EnergyUnavailableError(
                f"the energy counter of {gpu} rises by {counted_w:.3g} W, and its power reading is {power_w:.3g} W"
            )


def _open_gpus(amdsmi: AmdSmi | None, indices: Sequence[int] | None) -> tuple[list[_Gpu], list[_Gpu]]:
    """Return the chosen GPUs and all GPUs of the machine; raise an error if a chosen GPU is partitioned."""
    machine = _open_machine(amdsmi or _installed_amdsmi())
    visible = _visible(machine)
    gpus = [visible[index] for index in chosen_indices(indices, len(visible))]
    check_one_model([gpu.name for gpu in gpus], ", ".join(map(str, gpus)), HIP_VISIBLE_DEVICES)
    for gpu in gpus:
        try:
            partition = gpu.amdsmi.amdsmi_get_gpu_compute_partition(gpu.handle)
        except (AttributeError, gpu.amdsmi.AmdSmiException):  # only MI300 and later have partitions
            continue
        if partition not in ("SPX", "N/A", ""):
            raise EnergyUnavailableError(
                f"{gpu} is a part of a GPU (compute partition {partition}), and shares its energy counter with the"
                " others"
            )
    return gpus, machine


def _installed_amdsmi() -> AmdSmi:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Some versions print which parts are missing.
            import amdsmi
    # Without ROCm's library the import raises KeyError in some versions and OSError in others.
    except Exception as error:
        raise NoGpuError(f"the package amdsmi cannot be imported: {error!r}") from error
    return amdsmi


def _open_machine(amdsmi: AmdSmi) -> list[_Gpu]:
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
    except amdsmi.AmdSmiException as error:
        raise NoGpuError(f"the AMD driver does not answer: {error}") from error
    gpus = []
    for place, handle in enumerate(handles):
        try:
            name = amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]
        except amdsmi.AmdSmiException as error:
            raise EnergyUnavailableError(f"AMD GPU {place} does not tell its model: {error}") from error
        # amdsmi gives HIP's numbers since ROCm 6.4. In older versions, both usually list the GPUs in the same order.
        try:
            known = amdsmi.amdsmi_get_gpu_enumeration_info(handle)
        except (AttributeError, amdsmi.AmdSmiException):
            known = {}
        index = known.get("hip_id")
        uuid = str(known.get("hip_uuid", ""))
        gpus.append(_Gpu(amdsmi, handle, index if isinstance(index, int) else place, name, uuid))
    return sorted(gpus, key=lambda gpu: gpu.index)


def _visible(machine: Sequence[_Gpu]) -> Sequence[_Gpu]:
    # ROCR_VISIBLE_DEVICES hides GPUs from all of ROCm. HIP_VISIBLE_DEVICES takes precedence over CUDA_VISIBLE_DEVICES.
    hip = HIP_VISIBLE_DEVICES.text()
    hip = CUDA_VISIBLE_DEVICES.text() if hip is None else hip
    visible = machine
    for setting in (ROCR_VISIBLE_DEVICES.text(), hip):
        if setting is not None:
            visible = _listed(setting, visible)
    if not visible:
        raise NoGpuError(f"no AMD GPU is visible: the driver lists {len(machine)}")
    return visible


def _listed(setting: str, gpus: Sequence[_Gpu]) -> Sequence[_Gpu]:
    """Return the GPUs that a list of indices and UUIDs names, up to the first entry that names no GPU."""
    listed: list[_Gpu] = []
    for entry in (part.strip().lower() for part in setting.split(",")):
        named = [gpu for place, gpu in enumerate(gpus) if entry and entry in (str(place), gpu.uuid.lower())]
        if not named:
            break
        listed += named
    return listed


def _first_dies(gpus: Sequence[_Gpu], machine: Sequence[_Gpu]) -> list[_Gpu]:
    """Return the GPUs whose counters cover the energy of `gpus`; of two dies on one card, this is the first die."""
    counting = []
    for gpu in gpus:
        place = machine.index(gpu)
        before = machine[place - 1] if place > 0 else None
        after = machine[place + 1] if place + 1 < len(machine) else None
        if gpu.energy_uj() > 0:
            if after is not None and after not in gpus and after.energy_uj() == 0:
                raise _half_a_card(gpu, after)
            counting.append(gpu)
        elif before is None or before.energy_uj() == 0:
            raise EnergyUnavailableError(f"the energy counter of {gpu} stands at 0")
        elif before not in gpus:
            raise _half_a_card(gpu, before)
    return counting


def _half_a_card(gpu: _Gpu, twin: _Gpu) -> EnergyUnavailableError:
    return EnergyUnavailableError(
        f"{gpu} shares its energy counter with {twin}, which does not train: they are two dies of one card"
    )
