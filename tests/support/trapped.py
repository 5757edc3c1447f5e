"""A training that reveals every side effect of a probe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from zeus_plugins.client.local import LocalServer
from zeus_plugins.errors import ZeusBSOServerUnreachableError
from zeus_plugins.protocol import JobSpec, Probe, TrialId
from zeus_plugins.training import probe
from zeus_plugins.training.passes import Passes

SAMPLES = 640
SIZES = (8, 16, 32, 64)
OWN_SIZE = 16


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples with noise from all kinds of random states and from the number of calls."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(SAMPLES, 8, generator=self.generator)
        self.labels = self.pixels[:, :3].argmax(dim=1)
        self.own, self.older, self.calls = np.random.default_rng(1), np.random.RandomState(2), 0
        self.python = random.Random(3)  # noqa: S311 - no secret

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.calls += 1
        noise = random.random() + np.random.rand() + self.own.random() + self.older.rand() + self.python.random()  # noqa: S311 - no secret
        mixed = noise + torch.rand(1, generator=self.generator) + torch.randn(1) + self.calls / SAMPLES
        return {"pixels": self.pixels[index] + 0.1 * mixed, "labels": self.labels[index]}


class Counted:
    """A state in a slot."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def counting() -> Callable[[], int]:
    """Return a function with a number in its closure."""
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


class Trapped(nn.Module):
    """Dropout, BatchNorm, a moving average of weights, and a loss that depends on states of several kinds."""

    def __init__(self, *, has_batch_norm: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if has_batch_norm else nn.LayerNorm(16)
        self.layers = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.average = nn.Linear(8, 16).requires_grad_(False)
        self.loose = torch.ones(1, requires_grad=True)
        self.limit: int | None = None  # number of samples from which memory runs out
        self.losses: list[float] = []
        self.sizes: list[int] = []
        self.numbers: dict[str, Any] = {"tensor": torch.zeros(()), "array": np.zeros(1)}
        self.slot, self.count, self.seen = Counted(), counting(), {0}

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.limit is not None and len(labels) >= self.limit and self.training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        first: Any = self.layers[0]
        with torch.no_grad():
            self.average.weight.mul_(0.9).add_(first.weight, alpha=0.1)
        if self.training:
            self.slot.number += 1
            self.seen = self.seen | {len(self.seen)}
            self.numbers["tensor"] += 1
            self.numbers["array"] += 1
        steps = self.slot.number + self.count() + len(self.seen) + self.numbers["tensor"] + self.numbers["array"][0]
        logits = self.layers(pixels) + 0.01 * self.average(pixels)[:, :3]
        loss = functional.cross_entropy(logits, labels) * (1 + 0.001 * steps) * self.loose.sum()
        if self.training:
            self.losses.append(float(loss.detach()))
            self.sizes.append(len(labels))
        return {"loss": loss, "logits": logits}


def seed() -> None:
    """Set all random states."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def rest(model: Trapped, data: Noisy, *more: Any) -> list[Any]:
    """Return the final state of a training except its losses, for comparison."""
    generators = torch.get_rng_state(), data.generator.get_state()
    return [
        {name: value.tolist() for name, value in model.state_dict().items()},
        [None if each.grad is None else each.grad.tolist() for each in (*model.parameters(), model.loose)],
        [each.tolist() for each in generators],
        [random.random(), np.random.rand(), data.own.random(), data.older.rand(), data.python.random()],  # noqa: S311 - no secret
        [
            data.calls,
            model.slot.number,
            model.count(),
            model.seen,
            float(model.numbers["tensor"]),
            model.numbers["array"][0],
        ],
        *more,
    ]


def predicting(**fields: Any) -> JobSpec:
    """Return a job whose target is out of reach."""
    said = {"job_id": "job", "job_id_prefix": "job", "batch_sizes": SIZES, "higher_is_better_metric": False}
    return JobSpec(**(said | {"target_metric": -1.0, "max_epochs": 2, "default_batch_size": OWN_SIZE} | fields))


def unreachable(*_: Any, **__: Any) -> None:
    """Fail as a request to a server that is away."""
    raise ZeusBSOServerUnreachableError("as the test asked")


def favour_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a probe find that passes of all sizes take equally long, so that the largest size is predicted."""
    visit = probe.Prober._visit

    def visited(prober: probe.Prober, passes: Passes, size: int, count: int) -> None:
        visit(prober, passes, size, count)
        prober._timings[size] = probe.Timing(1.0)

    monkeypatch.setattr(probe.Prober, "_visit", visited)


@contextmanager
def generous(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Probe]]:
    """Let a probe use a whole epoch, because epochs of tests are short; collect the probes sent by this process."""
    sent: list[Probe] = []
    original = LocalServer.store_probe

    def store(server: LocalServer, trial: TrialId, found: Probe) -> None:
        sent.append(found)
        original(server, trial, found)

    with monkeypatch.context() as patch:
        patch.setattr(probe, "_SHARE", 1.0)
        patch.setattr(probe.Prober, "_left_s", lambda *_: 60.0)
        patch.setattr(LocalServer, "store_probe", store)
        yield sent
