"""Parts that are shown of a GPU beside savings: its counter, its memory, its power limits, its slices, and sharing it.

No setting of a GPU is changed, but its power limit where the user says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.errors import BenchmarkError
from benchmarks.recurrences.power import READ, REPLAY, SET
from benchmarks.recurrences.runs import Order
from benchmarks.recurrences.state import Record, write_whole
from zeus_plugins.energy.auto import choose
from zeus_plugins.energy.nvml_gpus import Nvml, installed_nvml
from zeus_plugins.gpu_check.results import Result, Verdict
from zeus_plugins.protocol import GP_VOI

TOLERANCE = 0.03
"""The largest distance of integrated power from the counter, as a part of the latter."""

_TASK = "resnet18"

_LIMIT_EPOCHS = {REPLAY: 2, READ: 8, SET: 200}
"""Of a GPU, a score of limits is measured, of 2.5 s each."""

_MEMORY_GIB = 2.0
"""Too little for the activations of the size that is not to fit, of which each image has more than a MiB."""

Train = Callable[[Sequence[Order]], list[Record]]
"""Trains as ordered, all at the same time; what came of each."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that was looked at: what was expected and found, and whether they agree; None: left open."""

    name: str
    expected: str
    found: str
    is_as_expected: bool | None
    details: Mapping[str, Any]


def examined_apart() -> list[Result]:
    """The findings of `zeus-plugins doctor --gpu-check`, in a process of its own.

    The process puts the GPU under load by CUDA, which it keeps until its end: in this one it would count as another
    process on the GPU in all trainings that follow.

    Raises:
        BenchmarkError: The process failed.
    """
    # Its load would outlive a harness that was killed.
    following = [sys.executable, "-m", "benchmarks.recurrences.following"]
    command = [*following, "zeus_plugins", "doctor", "--gpu-check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the project's own program
    if done.returncode:
        raise BenchmarkError(f"the GPUs could not be looked at: {done.stderr.strip()}")
    found = json.loads(done.stdout)["results"]
    return [Result(**{**each, "verdict": Verdict(each["verdict"])}) for each in found]


@dataclass(frozen=True, slots=True)
class Bench:
    """The tools of the parts.

    Attributes:
        train: Trains.
        state_of: Tells a trial's state by its job, and its number in it.
        shrink: As in `Task`.
        power_limits: Mode of the search for a power limit.
        nvml: What to call instead of the installed `pynvml`.
        examine: Looks at the GPUs.
    """

    train: Train
    state_of: Callable[[str, int], str]
    shrink: int = 1
    power_limits: str = REPLAY
    nvml: Nvml | None = None
    examine: Callable[[], Sequence[Result]] = examined_apart


def counter(bench: Bench) -> Part:
    """The energy counter against power readings, integrated, under load; and the GPUs that variables select."""
    results = bench.examine()
    spans = [each.details for each in results if each.check == "energy, load" and "counter_j" in each.details]
    mapped = [each for each in results if each.check.startswith("mapping")]
    distances = [
        span[reading] / span["counter_j"] - 1
        for span in spans
        for reading in ("mean_j", "instant_j")
        if span[reading] is not None and span["counter_j"] > 0
    ]
    agree = max(map(abs, distances)) <= TOLERANCE if distances else None
    told = ", ".join(f"{distance:+.1%}" for distance in distances) or "nothing to compare"
    selection = "; ".join(f"{each.check}: {each.verdict}" for each in mapped)
    details = {"distances": distances, "checks": {each.check: f"{each.verdict}: {each.found}" for each in results}}
    return Part(
        "counter", f"integrated power within {TOLERANCE:.0%} of the counter", f"{told}; {selection}", agree, details
    )


def _new(job: str) -> str:
    """An id that no job has yet: an earlier one, killed or asked for otherwise, has trials and settings of its own."""
    return f"{job}-{uuid4().hex[:8]}"


def memory(bench: Bench) -> Part:
    """A size that does not fit: it is infeasible, and the next recurrence takes a smaller one."""
    fits, too_large = (32, 4096) if bench.shrink == 1 else (32, 128)
    job_id = _new("memory")
    order = Order(
        task=_TASK,
        job_id=job_id,
        seed=1,
        policy=GP_VOI,
        batch_sizes=(fits, too_large),
        epochs=1,
        shrink=bench.shrink,
        memory_gib=_MEMORY_GIB,
        fits=fits,
    )
    (first,) = bench.train([order])
    state = bench.state_of(job_id, 1)
    (second,) = bench.train([order])
    found = f"size {too_large}: {state}; then size {second['batch_size']}: {second['state']}"
    is_avoided = state == "INFEASIBLE" and second["batch_size"] == fits
    return Part("memory", "infeasible, then a smaller size", found, is_avoided, {"first": first, "second": second})


def power_limits(bench: Bench) -> Part:
    """The search for a power limit: on a pretended device, read-only on the GPU, or setting its limits."""
    order = Order(
        task=_TASK,
        job_id=_new("power-limits"),
        seed=2,
        batch_size=8 if bench.shrink > 1 else 256,
        epochs=_LIMIT_EPOCHS[bench.power_limits] if bench.shrink == 1 else 8,
        shrink=bench.shrink,
        power_limits=bench.power_limits,
    )
    (run,) = bench.train([order])
    chosen_w, measured = run["notes"].get("chosen_limit_w"), run["notes"].get("limits_w", [])
    sets = bench.power_limits in (REPLAY, SET)
    expected = {
        REPLAY: "on a pretended device: the cheapest limit is chosen",
        SET: "limits are measured, one is chosen, and the one before comes back",
    }.get(bench.power_limits, "without permission: the limit in force is kept, and the training goes on")
    found = (
        f"limits measured: {', '.join(f'{limit:g} W' for limit in measured) or 'none'}; chosen: {chosen_w or 'none'}"
    )
    is_as_expected = run["state"] == "max_epochs_reached" and (chosen_w is not None) == sets
    return Part("power limits", expected, found, is_as_expected, {"mode": bench.power_limits, "run": run})


def slices(bench: Bench) -> Part:
    """The source of the energy of each GPU, named by its UUID, and of each MIG slice of it."""
    nvml = bench.nvml or installed_nvml()
    nvml.nvmlInit()
    sources: dict[str, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        for uuid in (nvml.nvmlDeviceGetUUID(handle), *_slices_of(nvml, handle)):
            name = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
            sources[name] = choose(device_indices=[name], nvml=bench.nvml).monitor.source
    honest = all(source.startswith("estimate") for name, source in sources.items() if name.startswith("MIG-"))
    found = "; ".join(f"{name}: {source}" for name, source in sources.items())
    expected = "a GPU by its UUID is measured; a MIG slice, which shares a counter, is estimated and says so"
    return Part("slices", expected, found, honest, {"sources": sources})


def _slices_of(nvml: Any, handle: Any) -> list[Any]:
    """UUIDs of the MIG slices of a GPU."""
    uuids = []
    with suppress(nvml.NVMLError):
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(nvml.NVMLError):
                uuids.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)))
    return uuids


def sharing(bench: Bench) -> Part:
    """Two trainings on one GPU at the same time: their figures say that others are in them."""
    orders = [
        Order(task=_TASK, job_id=f"sharing-{place}", seed=place, batch_size=64, epochs=10, shrink=bench.shrink)
        for place in (3, 4)
    ]
    sources = [str(run["energy_source"]) for run in bench.train(orders)]
    told = any("shared with other processes" in source for source in sources)
    return Part(
        "sharing", "the source of the energy says that it is shared", "; ".join(sources), told, {"sources": sources}
    )


PARTS: dict[str, Callable[[Bench], Part]] = {
    "counter": counter,
    "memory": memory,
    "power-limits": power_limits,
    "slices": slices,
    "sharing": sharing,
}
"""All parts by name, in their order; each takes a minute or two."""


def do_parts(
    bench: Bench, directory: Path, say: Callable[[str], None], *, may_begin: Callable[[float], bool] = lambda _: True
) -> int:
    """Do the parts that have not been done yet, and keep each in a file of the directory.

    Args:
        bench: What they need.
        directory: Where they are kept.
        say: Told of each.
        may_begin: Whether there is time for something of so many seconds.

    Returns:
        The number of parts that are left.
    """
    left = _left(directory)
    longest_s = 0.0
    while left and may_begin(longest_s):
        begun_s = time.monotonic()
        name = left.pop(0)
        done = PARTS[name](bench)
        write_whole(_file_of(name, directory), json.dumps(asdict(done)) + "\n")
        longest_s = max(longest_s, time.monotonic() - begun_s)
        say(f"{name}: {done.found}")
    return len(left)


def parts_to_do(directory: Path) -> int:
    """The number of parts that no file of the directory keeps."""
    return len(_left(directory))


def _left(directory: Path) -> list[str]:
    return [name for name in PARTS if not _file_of(name, directory).exists()]


def _file_of(name: str, directory: Path) -> Path:
    return directory / f"part-{name}.json"


def read_parts(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """The parts that are kept in the directories, in their order."""
    files = [_file_of(name, directory) for name in PARTS for directory in directories]
    return [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
