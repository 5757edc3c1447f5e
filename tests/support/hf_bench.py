"""What the tests of the Trainer's callbacks share: a server, a job of one's own on it, and callbacks that watch."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.support.hf_models import Scores, quiet_trainer
from tests.support.job_bench import JobBench
from tests.support.servers import Server
from zeus_plugins import JobSpec
from zeus_plugins.huggingface import ZeusBSOTrainerCallback


@dataclass
class Bench(JobBench):
    """One for the Trainer, with a folder."""

    folder: Path

    def callback(self, job: JobSpec | None = None, monitor: str = "score", **options: Any) -> ZeusBSOTrainerCallback:
        return ZeusBSOTrainerCallback(job or self.job(), monitor, **self.callback_options(options))

    def trainer(self, *callbacks: Any, scores: tuple[float, ...] = (), data: Any = None, **options: Any) -> Trainer:
        trainer_options = {"compute_metrics": Scores(*scores)} | (data or {})
        return quiet_trainer(self.folder, *callbacks, trainer_options=trainer_options, **options)


@pytest.fixture(autouse=True, scope="module", name="_one_thread")
def use_one_thread() -> Iterator[None]:
    """So small a network gains nothing from several threads, and waits for them where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="bench")
def make_bench(shared_server: Server, tmp_path: Path) -> Bench:
    return Bench(shared_server, f"digits-{uuid.uuid4().hex}", tmp_path)


class Watch(TrainerCallback):
    """Notes what the callback under test knows after each evaluation, and the learning rate of each step."""

    def __init__(self, zeus: ZeusBSOTrainerCallback | None = None) -> None:
        self._zeus = zeus
        self.epochs: list[float | None] = []
        self.rates: list[float] = []
        self.accumulation: set[int] = set()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._zeus is not None:
            self.epochs.append(self._zeus.trial.epoch)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])
        self.accumulation.add(args.gradient_accumulation_steps)


def sizes_of(trainer: Trainer) -> list[int]:
    model: Any = trainer.model
    return list(model.seen_sizes)
