"""AMD GPUs, by their energy counters (the package `amdsmi`, which comes with ROCm).

Written against the interface of amdsmi 7.0.2 and the reports of those who use it. No AMD GPU was at hand: nothing here
has met a real one, and the tests pretend one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from zeus_plugins.energy.counters import MICRO, CounterMonitor
from zeus_plugins.energy.integrated import SAMPLE_INTERVAL_S, IntegratedPower, IntegratedPowerMonitor
from zeus_plugins.energy.monitor import EnergyUnavailableError, NoGpuError, NoPowerLimitError
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
    def amdsmi_get_power_info(self, handle: Any) -> Mapping[str, Any]: ...  # noqa: D102
    def amdsmi_get_power_cap_info(self, handle: Any) -> Mapping[str, Any]: ...  # noqa: D102


class AmdSmiMonitor(CounterMonitor):
    """An `EnergyMonitor` over the visible AMD GPUs. Experimental: it was tried on no real GPU yet.

    The driver is first asked when `gpus` or `begin_window` is called, and ``ROCR_VISIBLE_DEVICES``,
    ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES`` are read then.

    Of a card with two dies (MI250) the first die's counter counts for both, and the second's stands at 0: such a card
    is measured where the training has both dies, and unavailable where it has one.

    Args:
        device_indices: Which of the visible GPUs train, counting from 0. None: all of them.
        max_power_w: The most that they draw together, in watts, should a driver tell no power limit.
        amdsmi: A stand-in for the installed `amdsmi`.
        clock: Monotonic seconds.
        sleep: Waits so many seconds.

    On first use each counter is compared with the power reading for a quarter of a second, where there is one: in some
    versions the unit of the counter was another one than was told.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, or a GPU without a counter of its own, or with
            one that counts less than a tenth, or more than ten times, of what its power amounts to.
        ZeusBSOConfigError: On first use: the GPUs are of several models, or one that was named does not exist.
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
        super().__init__("amdsmi", clock)
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._max_power_w = max_power_w
        self._amdsmi = amdsmi
        self._sleep = sleep

    def _find(self) -> tuple[Sequence[_Gpu], Callable[[], GpuConfig]]:
        gpus, machine = _open_gpus(self._amdsmi, self._device_indices)
        counting = _with_stated_power(_counting(gpus, machine), self._max_power_w)
        _compare(counting, self._clock, self._sleep)
        return counting, lambda: _described(counting, len(gpus))


class AmdSmiPowerMonitor(IntegratedPowerMonitor):
    """An `EnergyMonitor` over the visible AMD GPUs that reads their power, for those without a counter to trust.

    Experimental, as `AmdSmiMonitor`, whose arguments and errors these are. A GPU that tells no power, as the second die
    of an MI250 does, is unavailable.
    """

    def __init__(
        self,
        device_indices: Sequence[int] | None = None,
        *,
        interval_s: float = SAMPLE_INTERVAL_S,
        max_power_w: float | None = None,
        amdsmi: AmdSmi | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("amdsmi power", clock, interval_s)
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._max_power_w = max_power_w
        self._amdsmi = amdsmi

    def _find(self) -> tuple[Sequence[IntegratedPower], Callable[[], GpuConfig]]:
        found, _machine = _open_gpus(self._amdsmi, self._device_indices)
        gpus = _with_stated_power(found, self._max_power_w)
        return self._integrated(gpus), lambda: _described(gpus, len(gpus))


@dataclass(frozen=True)
class _Gpu:
    """One GPU, or one die of two; `index` counts those of the machine from 0, as HIP does."""

    amdsmi: AmdSmi
    handle: Any
    index: int
    name: str
    uuid: str
    stated_power_w: float | None = None

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def max_power_w(self) -> float:
        """The highest power limit that can be set, in watts; amdsmi tells it in microwatts."""
        try:
            limits = self._ask("power limits", self.amdsmi.amdsmi_get_power_cap_info)
            return self._number("power limits", limits, "max_power_cap") / MICRO
        except EnergyUnavailableError as unavailable:
            if self.stated_power_w is not None:
                return self.stated_power_w
            raise NoPowerLimitError(unavailable.cause) from unavailable

    def power_w(self) -> float:
        """The power that the GPU draws, in watts; which of the readings there is depends on the model."""
        told = self._ask("power reading", self.amdsmi.amdsmi_get_power_info)
        for key in ("socket_power", "current_socket_power", "average_socket_power"):
            number = told.get(key)
            if isinstance(number, int | float) and number > 0:
                return float(number)
        raise EnergyUnavailableError(f"{self} gives no power reading: amdsmi answers {dict(told)!r}")

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
        with contextlib.redirect_stdout(sys.stderr):  # Some versions print what they miss, into a command's own output.
            import amdsmi
    # Where ROCm's library is missing the import raises KeyError in some versions and OSError in others.
    except Exception as error:
        raise NoGpuError(f"the package amdsmi cannot be imported: {error!r}") from error
    module: AmdSmi = amdsmi
    return module


COMPARED_S = 0.25
"""Seconds for which a counter is compared with a power reading at first."""

# The readings are means of different lengths, at a load that may just have begun: this finds another unit.
_PLAUSIBLE = (0.1, 10.0)


def _compare(gpus: Sequence[_Gpu], clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Refuse counters that have nothing to do with the power that the GPUs tell, where they tell it."""
    telling = []
    for gpu in gpus:
        try:
            telling.append((gpu, gpu.power_w(), gpu.energy_uj(), clock()))
        except (EnergyUnavailableError, AttributeError):
            continue
    if not telling:
        return
    sleep(COMPARED_S)
    for gpu, power_w, begun_uj, begun_s in telling:
        counted_w = (gpu.energy_uj() - begun_uj) / MICRO / max(clock() - begun_s, 1e-9)
        lowest, highest = _PLAUSIBLE
        if not lowest * power_w <= counted_w <= highest * power_w:
            raise EnergyUnavailableError(
                f"the energy counter of {gpu} rises by {counted_w:.3g} W, and its power reading is {power_w:.3g} W"
            )


def _with_stated_power(gpus: Sequence[_Gpu], max_power_w: float | None) -> list[_Gpu]:
    return [replace(gpu, stated_power_w=None if max_power_w is None else max_power_w / len(gpus)) for gpu in gpus]


def _described(gpus: Sequence[_Gpu], number: int) -> GpuConfig:
    return GpuConfig(max_power=sum(gpu.max_power_w for gpu in gpus), number_of_gpus=number, gpu_model=gpus[0].name)


def _open_gpus(amdsmi: AmdSmi | None, indices: Sequence[int] | None) -> tuple[list[_Gpu], list[_Gpu]]:
    """The GPUs that train, each whole, and all of the machine."""
    machine = _open_machine(amdsmi or _installed_amdsmi())
    visible = _visible(machine)
    gpus = [visible[index] for index in chosen_indices(indices, len(visible))]
    check_one_model([gpu.name for gpu in gpus], ", ".join(map(str, gpus)), environment.HIP_VISIBLE_DEVICES)
    for gpu in gpus:
        _check_whole(gpu)
    return gpus, machine


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
