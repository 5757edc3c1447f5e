"""One recurrence in a process of its own: what the fork server forks, with the frameworks imported.

``main(["--order", JSON, "--server-url", URL, "--output", FILE])`` trains once and writes its outcome.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from benchmarks.recurrences import huggingface_tasks, lightning_tasks
from benchmarks.recurrences.following import end_with_parent
from benchmarks.recurrences.runs import FAILED_STATUS, OUT_OF_MEMORY, Curve, Order, Outcome, Run
from benchmarks.recurrences.tasks import GPU, REFUSED, SIMULATED, Device, Task
from zeus_plugins.energy import EnergyMonitor, EstimateMonitor, auto
from zeus_plugins.energy.monitor import DEFAULT_ESTIMATED_POWER_W, stated_power_w
from zeus_plugins.energy.nvml import open_gpus
from zeus_plugins.energy.processes import synchronize
from zeus_plugins.environment import JOB_ID, SERVER_URL
from zeus_plugins.errors import ZeusBSORuntimeError
from zeus_plugins.power_limit import find_devices
from zeus_plugins.protocol import cost
from zeus_plugins.training.trial import TrialInfo

_WHOLE = "whole training"
_IDLE = "idle"

_READ_S = 0.1

_PERFECT = 0.98
"""Accuracy at which a calibration training ends, because further epochs would show nothing new."""

_FRAMEWORKS = {"lightning": lightning_tasks.train, "transformers": huggingface_tasks.train}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train once; return the exit status: 0, or `FAILED_STATUS` if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", required=True, help="JSON, as Order.to_json makes it")
    parser.add_argument("--server-url", required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the outcome is written")
    options = parser.parse_args(arguments)
    end_with_parent()
    order = Order(**json.loads(options.order))
    outcome = trained(order, options.server_url, monitor_for(order.training.device), options.output.parent)
    finished = options.output.with_suffix(".part")
    finished.write_text(json.dumps(outcome.to_json()) + "\n", "utf-8")
    finished.rename(options.output)
    return 0 if outcome.reached else FAILED_STATUS


def device_of(task: Task) -> str:
    """Return the name of the device that trains `task` here; if a CPU replaces the GPU, the name says so."""
    if task.device != GPU:
        return "CPU"
    shrunk = f", models shrunk {task.shrink}-fold" if task.shrink > 1 else ""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name() + shrunk
    return f"{SIMULATED}, a CPU in its place{shrunk}"


def trained(order: Order, server_url: str, monitor: EnergyMonitor, measurement: Path) -> Outcome:
    """Train once in this process; return an outcome even if the training raises an error.

    `measurement` is the folder of the measurement, for the files that its trainings share. The environment has the
    server's URL and the job's id, so that the scripts need no argument for them.
    """
    # The networks of the CPU tasks are too small to gain from more threads. With one thread, the CPU time equals the
    # time that the training takes on an idle machine.
    torch.set_num_threads(1)
    task = order.training
    os.environ |= {str(SERVER_URL): server_url, str(JOB_ID): order.job_id}
    state, detail = "bare", ""
    with _quiet(), tempfile.TemporaryDirectory(prefix="recurrence-") as folder:
        if task.name == "fine-tuning" and not (weights := measurement / huggingface_tasks.PRETRAINED).exists():
            huggingface_tasks.pretrain(weights)  # once in a measurement, and not measured
        seed_everything(order.seed, verbose=False)
        trial: TrialInfo | None = None
        calibration: dict[str, Any] = {}
        curve = None
        if order.seconds is not None:
            if order.idle_s is not None:
                calibration["idle_w"] = _idle_w(monitor, order.idle_s)
                if torch.cuda.is_available():
                    torch.zeros(1, device="cuda")  # opens a context
                calibration["context_w"] = _idle_w(monitor, order.idle_s)
            curve = Curve(monitor, order.seconds, _PERFECT if task.higher_is_better else None)
        run = Run(order, task, Path(folder), measurement, curve)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        monitor.begin_window(_WHOLE)
        try:
            with _watched(curve, calibration):
                trial = _FRAMEWORKS[task.framework](run)
        except torch.OutOfMemoryError:
            state = OUT_OF_MEMORY
        except ZeusBSORuntimeError as error:
            state = REFUSED if error.status == HTTPStatus.CONFLICT else "broken"
            detail = str(error)
        except Exception as error:  # any error of the training belongs to the outcome
            state, detail = "broken", "".join(traceback.format_exception(error)[-3:])
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        synchronize()
        spent = monitor.end_window(_WHOLE)
        if curve is not None:
            curve.close()
            calibration["curve"] = curve.epochs
    size = trial.batch_size if trial is not None else order.batch_size or task.default_batch_size
    verdict = None if trial is None else trial.verdict
    reason = None if verdict is None else verdict.reason
    return Outcome(
        batch_size=size,
        reached=verdict is not None and verdict.converged,
        state=state if trial is None else str(reason or "ended without a verdict"),
        time_s=spent.time_s,
        energy_j=spent.energy_j,
        cost_j=cost(energy_j=spent.energy_j, time_s=spent.time_s, max_power_w=monitor.gpus().max_power, eta=0.5),
        energy_source=spent.source,
        device=device_of(task),
        epochs=None if trial is None else trial.epoch,
        metric=None if trial is None or trial.metric is None or math.isnan(trial.metric) else trial.metric,
        samples=None if trial is None or not task.samples else (trial.epoch or 0.0) * task.samples,
        fit_wall_s=wall_s,
        fit_cpu_s=cpu_s,
        detail=detail,
        **calibration,
    )


def _idle_w(monitor: EnergyMonitor, seconds: float) -> float:
    """Measure the mean power of idle devices, in watts."""
    monitor.begin_window(_IDLE)
    time.sleep(seconds)
    idle = monitor.end_window(_IDLE)
    return idle.energy_j / idle.time_s


@contextmanager
def _watched(curve: Curve | None, found: dict[str, Any]) -> Iterator[None]:
    """Store a calibration's highest power, power limit and GPU memory in `found`; without `curve`, store nothing."""
    if curve is None:
        yield
        return
    gpu, done, readings_w = open_gpus()[0], threading.Event(), [0.0]

    def read() -> None:
        while not done.wait(_READ_S):
            readings_w.append(gpu.instant_power_w())

    thread = threading.Thread(target=read, name="power-readings", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found["peak_w"] = max(readings_w)
        found["limit_w"] = find_devices()[0].limit_w()
        found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def monitor_for(device: Device) -> EnergyMonitor:
    """Return the machine's best energy monitor for `device`.

    On a CPU without an energy counter, the monitor estimates energy and reports CPU time as its time. The trainings on
    the CPU have one thread, so that CPU time equals elapsed time on an idle machine. On a busy machine, CPU time is
    closer to the time that the training would need on an idle machine.
    """
    if device == GPU:
        return auto()
    monitor = auto(device_indices=())
    if not isinstance(monitor, EstimateMonitor):
        return monitor
    stated_w = stated_power_w()
    power_w, basis = (DEFAULT_ESTIMATED_POWER_W, "assumed") if stated_w is None else (stated_w, "stated")
    return EstimateMonitor(power_w, basis=basis, clock=time.process_time)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the frameworks' messages and warnings, which are expected for small trainings."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "transformers", "zeus_plugins")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
