"""``python -m benchmarks.gpu_check [--json]``: check if the readings of a real GPU mean what the monitors assume.

`Examination` observes each visible NVIDIA GPU, at rest and under load, and changes none of its settings. PyTorch makes
the load.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.processes import BenchmarkError
from zeus_plugins.energy import EnergyUnavailableError
from zeus_plugins.energy.counters import POLL_S, next_moves
from zeus_plugins.energy.monitor import answer_or_none
from zeus_plugins.energy.nvml import Nvml, NvmlGpu, cuda_devices, open_gpus
from zeus_plugins.environment import CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import PowerLimitUnavailableError, find_devices
from zeus_plugins.power_limit.devices import PowerLimitDevice

PERIOD_S = 3.0
"""Seconds for which the moves of a reading are counted."""

PHASE_S = 4.0
"""Seconds of each phase, after `SETTLE_S` in which the mean power of the last second adapts."""

SETTLE_S = 1.5

SHORT_S = 2.0
"""Seconds of a comparison without phases."""

_SAMPLE_S = 0.01

BURST_S = 0.2
"""Seconds of work, and of rest, in bursts."""


@dataclass(frozen=True)
class Bursts:
    """Work for the first `share` of each period; periods begin at multiples of `period_s`, plus `phase_s`.

    Seconds are those of the monotonic clock.
    """

    period_s: float
    phase_s: float = 0.0
    share: float = 0.25

    def rest_s(self, now_s: float) -> float:
        """Return the seconds until the next work; 0 while there is work."""
        place_s = (now_s - self.phase_s) % self.period_s
        return 0.0 if place_s < self.share * self.period_s else self.period_s - place_s


# A sensor may sample for only 25 ms of each 100 ms. Of bursts with its period, at four phases, it sees all or nothing;
# bursts with other periods drift over its samples.
_BURSTS = (*(Bursts(0.1, phase_s) for phase_s in (0.0, 0.025, 0.05, 0.075)), Bursts(0.073), Bursts(0.137))

PHASE_AGREEMENT = 0.2
"""Largest difference of the joules of a multiplication between bursts of the same share of work."""

RUN_AGREEMENT = 0.5
"""Largest difference of these joules between bursts and continuous work, which may run at other clocks."""

_MATRIX_SIZE = 4096
_CALLS = 200

LONGEST_PERIOD_S = 0.15
"""Longest expected seconds between two moves of a counter; 20 to 100 ms were seen on Volta and newer."""

AGREEMENT = {"idle": 0.2, "load": 0.1, "bursts": 0.2}
"""Largest difference of energy by counter and by power readings, as a share of the counter's.

Both come from the same sensor. Under bursts and at rest, the ends of the measurement and the averaging weigh more.
"""

_MAPPING_TIMEOUT_S = 120.0

# Prints the result of `own_mapping` as a line of JSON.
_TELL_MAPPING = "import json; from benchmarks.gpu_check import own_mapping; print(json.dumps(own_mapping()))"


class Verdict(StrEnum):
    """The meaning of a result for the energy and the power limits of a training."""

    OK = "ok"
    DOUBTFUL = "doubtful"
    """A reading may be wrong, or something will not work."""
    SKIPPED = "skipped"


def _ok(is_ok: bool) -> Verdict:
    return Verdict.OK if is_ok else Verdict.DOUBTFUL


@dataclass(frozen=True)
class Result:
    """The result of one check on one GPU, or on the machine (""): words for people, details for programs."""

    check: str
    expected: str
    found: str
    verdict: Verdict
    gpu: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        place = f"{self.gpu}: " if self.gpu else ""
        return f"{self.verdict:<8} {place}{self.check}: {self.found} (expected: {self.expected})"


class Load:
    """Keeps the GPU with this UUID busy with products of matrices; raises `BenchmarkError` if PyTorch cannot use it."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self.multiplications = 0
        self._torch: Any = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise BenchmarkError("PyTorch cannot use CUDA, so nothing can load the GPU")

    @contextmanager
    def running(self, phase: str | Bursts) -> Iterator[None]:
        """Keep the GPU busy in the context: never (``idle``), always (``load``), or on and off (``bursts``, `Bursts`).

        `multiplications` counts the products that are done.
        """
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
        """Return the seconds until the calls of some work have returned, and until the work is done."""
        matrix = self._matrix()
        self._multiply(matrix)
        begun_s = time.monotonic()
        for _ in range(_CALLS):
            matrix @ matrix
        returned_s = time.monotonic()
        self._torch.cuda.synchronize(matrix.device)
        return returned_s - begun_s, time.monotonic() - begun_s

    def _work(self, phase: str | Bursts, stopped: threading.Event) -> None:
        matrix = self._matrix()
        bursts = Bursts(2 * BURST_S, share=1.0 if phase == "load" else 0.5) if isinstance(phase, str) else phase
        while not stopped.is_set():
            if rest_s := bursts.rest_s(time.monotonic()):
                stopped.wait(rest_s)
            else:
                self._multiply(matrix)
                self.multiplications += 1

    def _multiply(self, matrix: Any) -> None:
        matrix @ matrix
        self._torch.cuda.synchronize(matrix.device)

    def _matrix(self) -> Any:
        return self._torch.rand(_MATRIX_SIZE, _MATRIX_SIZE, device=self._device())

    def _device(self) -> Any:
        self._torch.cuda.init()
        known = cuda_devices(self._torch) or ()
        return self._torch.device("cuda", known.index(self._uuid.removeprefix("GPU-")))


def ask_mapping(variables: Mapping[str, str]) -> dict[str, Any]:
    """Run `own_mapping` in a new process with these variables only, without others that choose GPUs."""
    hidden = {CUDA_VISIBLE_DEVICES.name, CUDA_DEVICE_ORDER.name}
    environ = {name: value for name, value in os.environ.items() if name not in hidden} | dict(variables)
    command = [sys.executable, "-c", _TELL_MAPPING]
    try:
        done = subprocess.run(  # nosec B603  # noqa: S603 - this interpreter, on this module
            command, env=environ, capture_output=True, text=True, timeout=_MAPPING_TIMEOUT_S, check=True
        )
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"cuda": None, "ours": None, "problem": f"a process to ask could not be run: {error}"}
    return told


def own_mapping() -> dict[str, Any]:
    """Return the UUIDs of the GPUs by CUDA (`cuda`) and by this package (`ours`) in this process, and the `problem`."""
    told: dict[str, Any] = {"cuda": None, "ours": None, "problem": None}
    try:
        told["ours"] = [gpu.uuid for gpu in open_gpus()]  # before CUDA starts, so by the variable
    except ZeusBSOConfigError as error:
        return told | {"problem": str(error)}
    try:
        torch = importlib.import_module("torch")
        torch.cuda.init()
    except Exception as error:  # PyTorch is absent, or without CUDA
        return told | {"problem": f"PyTorch cannot start CUDA: {error}"}
    known = cuda_devices(torch)
    return told | ({"problem": "this PyTorch tells no UUIDs"} if known is None else {"cuda": list(known)})


@dataclass(frozen=True)
class Examination:
    """The checks of all visible GPUs; `load` makes the load for the GPU with a UUID."""

    nvml: Nvml | None = None
    load: Callable[[str], Load] = Load
    ask: Callable[[Mapping[str, str]], Mapping[str, Any]] = ask_mapping
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def results(self) -> Iterator[Result]:
        """Run the checks, about a minute for each GPU; raise `ZeusBSOConfigError` if none can be opened."""
        gpus = open_gpus(self.nvml)
        devices = [find_devices([gpu.uuid], nvml=self.nvml)[0] for gpu in gpus]
        for gpu, device in zip(gpus, devices, strict=True):
            yield from self._of(gpu)
            yield _limits(gpu, device)
        yield from self._mappings(gpus[0])

    def _of(self, gpu: NvmlGpu) -> Iterator[Result]:
        result = partial(Result, gpu=str(gpu))
        load = self.load(gpu.uuid)
        others = gpu.other_processes()
        found = f"{others} beside this one" if others else "none is told of"
        yield result("other processes", "none computes on the GPU", found, _ok(not others), details={"others": others})
        try:
            for what, read in (("counter", gpu.energy_uj), ("power reading", gpu.power_w)):
                with load.running("load"):
                    yield period_result(str(gpu), what, self._periods_s(read), PERIOD_S)
            for phase in AGREEMENT:
                with load.running(phase):
                    self.sleep(SETTLE_S)
                    yield agreement_result(str(gpu), phase, self._span(gpu, PHASE_S))
            yield self._phases(gpu, load)
        except EnergyUnavailableError as error:
            yield result("readings", "a counter and power readings", error.cause, Verdict.DOUBTFUL)
        returned_s, done_s = load.queued()
        missed = max(0.0, 1 - returned_s / done_s) if done_s > 0 else 0.0
        expected = "calls return before their work is done: a window has to wait for it"
        found = f"{missed:.0%} of the work was still to do when its calls had returned; the callbacks wait for it"
        details = {"returned_s": returned_s, "done_s": done_s, "missed": missed}
        yield result("queued work", expected, found, Verdict.OK, details=details)

    def _periods_s(self, read: Callable[[], float]) -> list[float]:
        begun_s, latest = self.clock(), read()
        moves_s: list[float] = []
        while (now_s := self.clock()) - begun_s < PERIOD_S:
            if (reading := read()) != latest:
                latest = reading
                moves_s.append(now_s)
            self.sleep(POLL_S)
        return [after - before for before, after in pairwise(moves_s)]

    def _span(self, gpu: NvmlGpu, least_s: float) -> Span:
        """Measure from one move of the counter to another, so that its steps do not matter."""
        begun_s, begun_uj = self._move(gpu)
        means: list[tuple[float, float | None]] = []
        instants: list[tuple[float, float | None]] = []
        while (now_s := self.clock()) - begun_s < least_s or len(means) < 2:
            means.append((now_s, answer_or_none(gpu.power_w)))
            instants.append((now_s, answer_or_none(gpu.instant_power_w)))
            self.sleep(_SAMPLE_S)
        ended_s, ended_uj = self._move(gpu)
        time_s = ended_s - begun_s
        return Span(time_s, (ended_uj - begun_uj) / 1e6, _energy_j(means, time_s), _energy_j(instants, time_s))

    def _phases(self, gpu: NvmlGpu, load: Load) -> Result:
        """Compare the joules of a multiplication in continuous work and in bursts, less the power at rest."""
        rest_s, rest_j, _ = self._counted(gpu, load, "idle")
        rest_w = rest_j / rest_s
        _, run_j, run_count = self._counted(gpu, load, "load")
        found: list[float | None] = []
        for bursts in _BURSTS:
            time_s, spent_j, count = self._counted(gpu, load, bursts)
            found.append((spent_j - rest_w * time_s * (1 - bursts.share)) / count if count else None)
        return phase_result(str(gpu), run_j / run_count if run_count else None, dict(zip(_BURSTS, found, strict=True)))

    def _counted(self, gpu: NvmlGpu, load: Load, phase: str | Bursts) -> tuple[float, float, int]:
        """Return the seconds, joules and multiplications of a phase, from one move of the counter to another."""
        with load.running(phase):
            self.sleep(SETTLE_S / 3)
            begun_s, begun_uj = self._move(gpu)
            begun = load.multiplications
            self.sleep(SHORT_S)
            ended_s, ended_uj = self._move(gpu)
            return ended_s - begun_s, (ended_uj - begun_uj) / 1e6, load.multiplications - begun

    def _move(self, gpu: NvmlGpu) -> tuple[float, int]:
        """Return time and value of the next move of the counter, or of its last reading after a second."""
        return next_moves([gpu.energy_uj], self.clock, self.sleep)[0]

    def _mappings(self, gpu: NvmlGpu) -> Iterator[Result]:
        place = str(gpu.index)
        forms = {
            "index": {"CUDA_VISIBLE_DEVICES": place},
            "index, bus order": {"CUDA_VISIBLE_DEVICES": place, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            "UUID": {"CUDA_VISIBLE_DEVICES": gpu.uuid},
            "short UUID": {"CUDA_VISIBLE_DEVICES": gpu.uuid[: len("GPU-") + 8]},
        }
        for form, variables in forms.items():
            told = self.ask(variables)
            yield mapping_result(form, told["cuda"], told["ours"], told["problem"])


def _energy_j(readings: Sequence[tuple[float, float | None]], time_s: float) -> float | None:
    """Integrate power readings, each with its time, and scale to `time_s`; return None if one is missing."""
    known = [(now_s, power_w) for now_s, power_w in readings if power_w is not None]
    if len(known) < len(readings):
        return None
    sampled_j = sum((later_s - now_s) * (now_w + later_w) / 2 for (now_s, now_w), (later_s, later_w) in pairwise(known))
    return sampled_j / (known[-1][0] - known[0][0]) * time_s


def _limits(gpu: NvmlGpu, device: PowerLimitDevice) -> Result:
    expected = "range, limit in force and default limit are told"
    try:
        lowest_w, highest_w = device.range_w()
        details = {
            "lowest_w": lowest_w,
            "highest_w": highest_w,
            "limit_w": device.limit_w(),
            "enforced_w": device.enforced_limit_w(),
            "default_w": device.default_limit_w(),
        }
    except PowerLimitUnavailableError as error:
        return Result("power limits", expected, str(error), Verdict.DOUBTFUL, str(gpu))
    told = {name: "unknown" if watts is None else f"{watts:g} W" for name, watts in details.items()}
    found = f"{told['limit_w']} of {told['lowest_w']} to {told['highest_w']}, default {told['default_w']}"
    is_usual = details["default_w"] is not None and details["limit_w"] == details["default_w"] == details["enforced_w"]
    return Result("power limits", expected, found, _ok(is_usual), str(gpu), details)


def period_result(gpu: str, what: str, periods_s: list[float], span_s: float) -> Result:
    """Judge the seconds between successive moves of a reading."""
    expected = f"moves every {1000 * LONGEST_PERIOD_S:g} ms or more often"
    if not periods_s:
        found, verdict, details = f"has not moved twice in {span_s:.2g} s", Verdict.DOUBTFUL, {}
    else:
        middle_s, longest_s = median(periods_s), max(periods_s)
        found = f"every {1000 * middle_s:.3g} ms in the median, {1000 * longest_s:.3g} ms at most"
        verdict = _ok(middle_s <= LONGEST_PERIOD_S)
        details = {"median_s": middle_s, "longest_s": longest_s, "moves": len(periods_s)}
    return Result(f"period of the {what}", expected, found, verdict, gpu, details)


@dataclass(frozen=True)
class Span:
    """The joules of one span by the counter, and by mean and instant power readings; None without a reading."""

    time_s: float
    counter_j: float
    mean_j: float | None
    instant_j: float | None


def agreement_result(gpu: str, phase: str, span: Span) -> Result:
    """Compare the counter and the power readings in a phase."""
    allowed = AGREEMENT[phase]
    expected = f"power readings within {allowed:.0%} of the counter"
    details = vars(span) | {"allowed": allowed}
    if span.counter_j <= 0:
        found = f"the counter rose by {span.counter_j:g} J in {span.time_s:.3g} s"
        return Result(f"energy, {phase}", expected, found, Verdict.DOUBTFUL, gpu, details)
    told, worst = [f"{span.counter_j / span.time_s:.4g} W by the counter"], 0.0
    for name, joules in (("mean", span.mean_j), ("instant", span.instant_j)):
        if joules is None:
            told.append(f"no {name} power")
            continue
        difference = joules / span.counter_j - 1
        worst = max(worst, abs(difference))
        told.append(f"{name} power {difference:+.1%}")
    is_alone = span.mean_j is None and span.instant_j is None
    verdict = Verdict.SKIPPED if is_alone else _ok(worst <= allowed)
    return Result(f"energy, {phase}", expected, ", ".join(told), verdict, gpu, details)


def phase_result(gpu: str, run_j: float | None, bursts_j: Mapping[Bursts, float | None]) -> Result:
    """Judge the joules of a multiplication, in continuous work and by bursts: only a sensor that skips differs."""
    expected = f"the phase of bursts changes the joules of a multiplication by at most {PHASE_AGREEMENT:.0%}"
    details = {"run_j": run_j, "bursts_j": [{**vars(bursts), "joules": each} for bursts, each in bursts_j.items()]}
    known = [each for each in bursts_j.values() if each is not None]
    if not run_j or len(known) < len(bursts_j):
        found = "the counter or the load stood still"
        return Result("energy, phases", expected, found, Verdict.DOUBTFUL, gpu, details)
    middle_j = median(known)
    spread = (max(known) - min(known)) / abs(middle_j) if middle_j else float("inf")
    differences = [each / run_j - 1 for each in known]
    found = f"{run_j:.3g} J in continuous work, bursts {min(differences):+.0%} to {max(differences):+.0%}"
    is_ok = spread <= PHASE_AGREEMENT and abs(middle_j / run_j - 1) <= RUN_AGREEMENT
    return Result("energy, phases", expected, found, _ok(is_ok), gpu, details | {"spread": spread})


def mapping_result(form: str, cuda: list[str] | None, ours: list[str] | None, problem: str | None) -> Result:
    """Compare CUDA's and this package's GPUs for one form of the variable."""
    expected = "CUDA and this package mean the same GPUs"
    details = {"cuda": cuda, "ours": ours}
    if problem is not None:
        return Result(f"mapping by {form}", expected, problem, Verdict.SKIPPED, details=details)
    bare_cuda, bare_ours = ([uuid.removeprefix("GPU-") for uuid in uuids or ()] for uuids in (cuda, ours))
    is_same = bare_cuda == bare_ours != []
    found = f"both: {', '.join(ours or ())}" if is_same else f"CUDA: {cuda}, this package: {ours}"
    return Result(f"mapping by {form}", expected, found, _ok(is_same), details=details)


def main(arguments: Sequence[str] | None = None, examination: Examination | None = None) -> int:
    """Print the results, and return the exit status: 1 without a GPU that can be checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="Checks the NVIDIA GPUs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    is_json = parser.parse_args(arguments).json
    results = []
    try:
        for result in (examination or Examination()).results():
            results.append(result)
            if not is_json:
                print(result, flush=True)
    except (ZeusBSOConfigError, BenchmarkError) as error:
        print(f"benchmarks.gpu_check: {error}", file=sys.stderr)
        return 1
    if is_json:
        doubtful = sum(each.verdict is Verdict.DOUBTFUL for each in results)
        print(json.dumps({"doubtful": doubtful, "results": [asdict(each) for each in results]}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
