"""AMD GPUs, by their energy counters (the package `amdsmi`, which comes with ROCm).

Written against the interface of amdsmi 7.0.2 and the reports of those who use it. No AMD GPU was at hand: nothing here
has met a real one, and the tests pretend one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from zeus_plugins.energy.counters import MICRO, CounterMonitor
from zeus_plugins.energy.monitor import EnergyUnavailableError, NoGpuError
from zeus_plugins.energy.visible import check_one_model, chosen_indices
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training import environment

Answer = TypeVar("Answer")


class AmdSmi(Protocol):
    """The part of `amdsmi` that is used here; AMD documents the functions under these names."""

    AmdSmiException: type[Exception]

    def amdsmi_init(self) -> None: ...  # noqa: D102
    def amdsmi_get_processor_handles(self) -> Sequence[Any]: ...  # noqa: D102
    def amdsmi_get_gpu_asic_info(self, handle: Any) -> Mapping[str, Any]: ...  # noqa: D102
    def amdsmi_get_gpu_enumeration_info(self, handle: Any) -> Mapping[str, Any]: ...  # noqa: D102
    def amdsmi_get_gpu_compute_partition(self, handle: Any) -> str: ...  # noqa: D102
    def amdsmi_get_energy_count(self, handle: Any) -> Mapping[str, Any]: ...  # noqa: D102
    def amdsmi_get_power_cap_info(self, handle: Any) -> Mapping[str, Any]: ...  # noqa: D102


class AmdSmiMonitor(CounterMonitor):
    """An `EnergyMonitor` over the visible AMD GPUs. Experimental: it was tried on no real GPU yet.

    The driver is first asked when `gpus` or `begin_window` is called, and ``ROCR_VISIBLE_DEVICES``,
    ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES`` are read then.

    Of a card with two dies (MI250) the first die's counter counts for both, and the second's stands at 0: such a card
    is measured where the training has both dies, and unavailable where it has one.

    Args:
        device_indices: Which of the visible GPUs train, counting from 0. None: all of them.
        amdsmi: A stand-in for the installed `amdsmi`.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, or a GPU without a counter of its own.
        ZeusBSOConfigError: On first use: the GPUs are of several models, or one that was named does not exist.
    """

    def __init__(
        self,
        device_indices: Sequence[int] | None = None,
        *,
        amdsmi: AmdSmi | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("amdsmi", clock)
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._amdsmi = amdsmi

    def _find(self) -> tuple[Sequence[_Gpu], Callable[[], GpuConfig]]:
        machine = _open_machine(self._amdsmi or _installed_amdsmi())
        visible = _visible(machine)
        gpus = [visible[index] for index in chosen_indices(self._device_indices, len(visible))]
        check_one_model([gpu.name for gpu in gpus], ", ".join(map(str, gpus)), environment.HIP_VISIBLE_DEVICES)
        for gpu in gpus:
            _check_whole(gpu)
        counting = _counting(gpus, machine)
        max_power_w = sum(gpu.max_power_w for gpu in counting)
        described = GpuConfig(max_power=max_power_w, number_of_gpus=len(gpus), gpu_model=gpus[0].name)
        return counting, lambda: described


@dataclass(frozen=True)
class _Gpu:
    """One GPU, or one die of two; `index` counts those of the machine from 0, as HIP does."""

    amdsmi: AmdSmi
    handle: Any
    index: int
    name: str
    uuid: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def max_power_w(self) -> float:
        """The highest power limit that can be set, in watts; amdsmi tells it in microwatts."""
        limits = self._ask("power limits", self.amdsmi.amdsmi_get_power_cap_info)
        return self._number("power limits", limits, "max_power_cap") / MICRO

    def energy_uj(self) -> int:
        """Energy in microjoules since the driver was loaded."""
        count = self._ask("energy counter", self.amdsmi.amdsmi_get_energy_count)
        # It was called `power` before ROCm 6.2.
        key = "energy_accumulator" if "energy_accumulator" in count else "power"
        return round(
            self._number("energy counter", count, key) * self._number("energy counter", count, "counter_resolution")
        )

    def _ask(self, what: str, question: Callable[[Any], Answer]) -> Answer:
        try:
            return question(self.handle)
        except self.amdsmi.AmdSmiException as error:
            raise EnergyUnavailableError(f"{self} gives no {what}: {error}") from error

    def _number(self, what: str, answer: Mapping[str, Any], key: str) -> float:
        number = answer.get(key)
        if not isinstance(number, int | float):  # amdsmi says "N/A"
            raise EnergyUnavailableError(f"{self} gives no {what}: amdsmi answers {key}={number!r}")
        return number


def _installed_amdsmi() -> AmdSmi:
    try:
        import amdsmi
    # Where ROCm's library is missing the import raises KeyError in some versions and OSError in others.
    except Exception as error:
        raise NoGpuError(f"the package amdsmi cannot be imported: {error!r}") from error
    module: AmdSmi = amdsmi
    return module


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
        index, uuid = _enumeration(amdsmi, handle, place)
        gpus.append(_Gpu(amdsmi, handle, index, name, uuid))
    return sorted(gpus, key=lambda gpu: gpu.index)


def _enumeration(amdsmi: AmdSmi, handle: Any, place: int) -> tuple[int, str]:
    """HIP's index and id of a GPU; amdsmi knows them since ROCm 6.4, and lists GPUs in the same order as a rule."""
    try:
        known = amdsmi.amdsmi_get_gpu_enumeration_info(handle)
    except (AttributeError, amdsmi.AmdSmiException):
        return place, ""
    index = known.get("hip_id")
    return (index if isinstance(index, int) else place), str(known.get("hip_uuid", ""))


def _visible(machine: Sequence[_Gpu]) -> Sequence[_Gpu]:
    # ROCR_VISIBLE_DEVICES hides GPUs from everything that runs on ROCm. Of the others, HIP obeys the first that is set.
    hip = environment.HIP_VISIBLE_DEVICES.text()
    hip = environment.CUDA_VISIBLE_DEVICES.text() if hip is None else hip
    visible = machine
    for setting in (environment.ROCR_VISIBLE_DEVICES.text(), hip):
        if setting is not None:
            visible = _listed(setting, visible)
    if not visible:
        raise NoGpuError(f"no AMD GPU is visible: the driver lists {len(machine)}")
    return visible


def _listed(setting: str, gpus: Sequence[_Gpu]) -> Sequence[_Gpu]:
    """The GPUs of a list of indices and ids, up to the first entry that names none."""
    listed: list[_Gpu] = []
    for entry in (part.strip().lower() for part in setting.split(",")):
        named = [gpu for place, gpu in enumerate(gpus) if entry and entry in (str(place), gpu.uuid.lower())]
        if not named:
            break
        listed += named
    return listed


def _check_whole(gpu: _Gpu) -> None:
    """Refuse a part of a GPU that is cut into several (MI300's compute partitions)."""
    try:
        partition = gpu.amdsmi.amdsmi_get_gpu_compute_partition(gpu.handle)
    except (AttributeError, gpu.amdsmi.AmdSmiException):  # what does not know partitions has none
        return
    if partition not in ("SPX", "N/A", ""):
        raise EnergyUnavailableError(
            f"{gpu} is a part of a GPU (compute partition {partition}), and shares its energy counter with the others"
        )


def _counting(gpus: Sequence[_Gpu], machine: Sequence[_Gpu]) -> list[_Gpu]:
    """Those whose counters count for all of these: of two dies on one card, the first."""
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
