"""Measurement windows over equal work: some wait for the GPU at their end, others do not wait."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.recurrences.lightning_tasks import Learner, making
from benchmarks.recurrences.runs import Run

_WINDOW = "steps"
_STEPS = 20
_WARMUP = 5


def windows(run: Run) -> list[tuple[bool, float, float]]:
    """Train in pairs of measurement windows, one window of each pair with and one without synchronising the GPU.

    Each window has `_STEPS` optimizer steps at the run's batch size. A window without synchronising ends as soon as
    the calls of its steps have returned; the GPU then finishes this work before the next window begins.

    Returns:
        For each window: whether it was synchronised, its joules, and its seconds.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    samples, network, _, lr = making(run)
    learner = Learner(network, run.task.metric, "adamw", lr).to(device)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=lr)
    inputs, targets = (each[: run.batch_size].to(device) for each in samples.train)

    def train(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = nn.functional.cross_entropy(learner(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    train(_WARMUP)
    found = []
    for place in range(2 * run.order.windows):
        synchronises = place % 4 in (0, 3)  # the mirrored order cancels a steady drift of the GPU
        wait()
        run.monitor.begin_window(_WINDOW)
        train(_STEPS)
        if synchronises:
            wait()
        spent = run.monitor.end_window(_WINDOW)
        found.append((synchronises, spent.energy_j, spent.time_s))
    return found
