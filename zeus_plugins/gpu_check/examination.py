"""Looks at NVIDIA GPUs at rest and under load, and changes nothing of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from zeus_plugins.energy import EnergyUnavailableError
from zeus_plugins.energy.nvml_gpus import Nvml, NvmlGpu, open_gpus
from zeus_plugins.energy.nvml_notes import other_processes, power_in, scope_of
from zeus_plugins.gpu_check import mapping
from zeus_plugins.gpu_check.load import Load, TorchLoad
from zeus_plugins.gpu_check.results import (
    AGREEMENT,
    Result,
    Span,
    Verdict,
    agreement_result,
    mapping_result,
    period_result,
    synchronization_result,
)
from zeus_plugins.power_limit import PowerLimitUnavailableError, find_devices
from zeus_plugins.power_limit.devices import PowerLimitDevice, default_limit_w, enforced_limit_w
from zeus_plugins.training.environment import POWER_LIMIT_COMMAND, ZEUSD_SOCK_PATH

PERIOD_S = 3.0
"""Seconds for which readings are watched."""

PHASE_S = 4.0
"""Seconds of each phase, after `SETTLE_S`: a mean power reading is that of the last second."""

SETTLE_S = 1.5

_POLL_S = 0.002
_SAMPLE_S = 0.01

# NVML_FI_DEV_POWER_INSTANT, and the scope of the GPU.
_POWER_INSTANT, _OF_GPU = 186, 0

# The bit of CAP_SYS_ADMIN in the capabilities that Linux tells of a process.
_SYS_ADMIN = 1 << 21


class Examination:
    """One look at all visible GPUs.

    Args:
        nvml: What to call instead of the installed `pynvml`.
        load: Makes the work for the GPU with a UUID.
        ask: Tells what CUDA means by variables; as `mapping.ask`.
        clock: Monotonic seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        nvml: Nvml | None = None,
        *,
        load: Callable[[str], Load] = TorchLoad,
        ask: Callable[[Mapping[str, str]], Mapping[str, Any]] = mapping.ask,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nvml = nvml
        self._load = load
        self._ask = ask
        self._clock = clock
        self._sleep = sleep

    def results(self) -> Iterator[Result]:
        """Look at one thing after another; takes about half a minute for each GPU.

        Raises:
            ZeusBSOConfigError: There is no NVIDIA GPU that could be looked at.
        """
        gpus = open_gpus(self._nvml)
        devices = find_devices(nvml=self._nvml)
        for gpu, device in zip(gpus, devices, strict=True):
            yield from self._of(gpu)
            yield _limits(gpu, device)
        yield _permission(devices[0])
        yield from self._mappings(gpus[0])

    def _of(self, gpu: NvmlGpu) -> Iterator[Result]:
        load = self._load(gpu.uuid)
        missing = load.problem()
        yield _company(gpu)
        yield _scope(gpu)
        try:
            for what, read in (("counter", gpu.energy_uj), ("power reading", gpu.power_w)):
                with load.running("idle" if missing else "load"):
                    yield period_result(str(gpu), what, self._periods_s(read), PERIOD_S)
            for phase in AGREEMENT:
                if missing and phase != "idle":
                    yield Result(f"energy, {phase}", "a load", missing, Verdict.SKIPPED, str(gpu))
                    continue
                with load.running(phase):
                    self._sleep(SETTLE_S)
                    yield agreement_result(str(gpu), phase, self._span(gpu))
        except EnergyUnavailableError as error:
            yield Result("readings", "a counter and power readings", error.cause, Verdict.DOUBTFUL, str(gpu))
        if missing:
            yield Result("queued work", "a load", missing, Verdict.SKIPPED, str(gpu))
        else:
            yield synchronization_result(str(gpu), *load.queued())

    def _periods_s(self, read: Callable[[], float]) -> list[float]:
        """Seconds between two moves of a reading."""
        begun_s, latest = self._clock(), read()
        moves_s: list[float] = []
        while (now_s := self._clock()) - begun_s < PERIOD_S:
            if (reading := read()) != latest:
                latest = reading
                moves_s.append(now_s)
            self._sleep(_POLL_S)
        return [after - before for before, after in pairwise(moves_s)]

    def _span(self, gpu: NvmlGpu) -> Span:
        """Energy from one move of the counter to another, so that its steps do not matter."""
        begun_s, begun_uj = self._move(gpu)
        sums_j = [0.0, 0.0]
        before: tuple[float, list[float | None]] | None = None
        is_told = [True, True]
        while True:
            now_s, told = self._clock(), [_mean_w(gpu), power_in(gpu, _OF_GPU, _POWER_INSTANT)]
            for place, power_w in enumerate(told):
                earlier_w = before[1][place] if before is not None else power_w
                if power_w is None or earlier_w is None:
                    is_told[place] = False
                elif before is not None:
                    sums_j[place] += (now_s - before[0]) * (power_w + earlier_w) / 2
            before = now_s, told
            if now_s - begun_s >= PHASE_S:
                break
            self._sleep(_SAMPLE_S)
        sampled_s = before[0] - begun_s
        ended_s, ended_uj = self._move(gpu)
        time_s = ended_s - begun_s
        mean_j, instant_j = (
            sums_j[place] / sampled_s * time_s if is_told[place] and sampled_s > 0 else None for place in (0, 1)
        )
        return Span(time_s, (ended_uj - begun_uj) / 1e6, mean_j, instant_j)

    def _move(self, gpu: NvmlGpu) -> tuple[float, int]:
        """The next move of the counter, which is waited for a second at most: when, and where to."""
        begun_s, latest_uj = self._clock(), gpu.energy_uj()
        while (now_s := self._clock()) - begun_s < 1.0:
            reading_uj = gpu.energy_uj()
            if reading_uj != latest_uj:
                return now_s, reading_uj
            self._sleep(_POLL_S)
        return now_s, latest_uj

    def _mappings(self, gpu: NvmlGpu) -> Iterator[Result]:
        place = str(gpu.index)
        forms = {
            "index": {"CUDA_VISIBLE_DEVICES": place},
            "index, bus order": {"CUDA_VISIBLE_DEVICES": place, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            "UUID": {"CUDA_VISIBLE_DEVICES": gpu.uuid},
            "short UUID": {"CUDA_VISIBLE_DEVICES": gpu.uuid[: len("GPU-") + 8]},
        }
        for form, variables in forms.items():
            told = self._ask(variables)
            yield mapping_result(form, told["cuda"], told["ours"], told["problem"])


def _mean_w(gpu: NvmlGpu) -> float | None:
    try:
        return gpu.power_w()
    except EnergyUnavailableError:
        return None


def _company(gpu: NvmlGpu) -> Result:
    others = other_processes(gpu)
    found = f"{others} beside this one" if others else "none is told of"
    verdict = Verdict.DOUBTFUL if others else Verdict.OK
    return Result("other processes", "none computes on the GPU", found, verdict, str(gpu), {"others": others})


def _scope(gpu: NvmlGpu) -> Result:
    scope = scope_of(gpu)
    found = scope or "there is only the GPU"
    return Result("scope", "GPU or module is known", found, Verdict.OK, str(gpu), {"scope": scope or None})


def _limits(gpu: NvmlGpu, device: PowerLimitDevice) -> Result:
    expected = "range, limit in force and default limit are told"
    try:
        lowest_w, highest_w = device.range_w()
        details = {
            "lowest_w": lowest_w,
            "highest_w": highest_w,
            "limit_w": device.limit_w(),
            "enforced_w": enforced_limit_w(device),
            "default_w": default_limit_w(device),
        }
    except PowerLimitUnavailableError as error:
        return Result("power limits", expected, str(error), Verdict.DOUBTFUL, str(gpu))
    told = {name: "unknown" if watts is None else f"{watts:g} W" for name, watts in details.items()}
    found = f"{told['limit_w']} of {told['lowest_w']} to {told['highest_w']}, default {told['default_w']}"
    is_usual = details["default_w"] is not None and details["limit_w"] == details["default_w"] == details["enforced_w"]
    return Result("power limits", expected, found, Verdict.OK if is_usual else Verdict.DOUBTFUL, str(gpu), details)


def _permission(device: PowerLimitDevice) -> Result:
    """The setter of limits, as far as that is known without setting one."""
    expected = "root, CAP_SYS_ADMIN, a command or zeusd"
    ways = [str(each) for each in (POWER_LIMIT_COMMAND, ZEUSD_SOCK_PATH) if each.text()]
    if _may_administrate():
        ways.append("this process, which may administrate the system")
    found = f"{', '.join(ways) or 'none'} (nothing was set to find out)"
    details = {"ways": ways, "device": type(device).__name__}
    return Result("setting limits", expected, found, Verdict.OK if ways else Verdict.DOUBTFUL, details=details)


def _may_administrate(status: Path = Path("/proc/self/status")) -> bool:
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # other systems than Linux
        return hasattr(os, "geteuid") and os.geteuid() == 0
    return any(line.startswith("CapEff:") and int(line.split()[1], 16) & _SYS_ADMIN for line in lines)
