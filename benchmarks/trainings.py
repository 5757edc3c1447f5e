"""Tiny trainings with many steps per epoch, in both frameworks, with the callback and without it.

A step does next to nothing, so that what a callback costs in one would show. Everything is imported where it is used:
the frameworks are large, and either may be absent.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeus_plugins.protocol import JobSpec

BATCH_SIZE = 4
SCORE = "score"


@dataclass(frozen=True, slots=True)
class Duration:
    """Wall-clock time and CPU time of something that was measured.

    Attributes:
        wall_s: Seconds that passed.
        cpu_s: Seconds that this thread computed: what else runs on the machine counts less.
    """

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = time.thread_time(), time.perf_counter()

    def read(self) -> Duration:
        """The time since then."""
        return Duration(time.perf_counter() - self._wall_s, time.thread_time() - self._cpu_s)


@dataclass
class EpochClock:
    """Times epochs from the start of one to the start of the next.

    Attributes:
        between: Called between two epochs, while no time is counted. Says whether there is time for more epochs.
        epochs: Each epoch but the last one.
    """

    between: Callable[[], bool]
    epochs: list[Duration] = field(default_factory=list)
    _watch: Stopwatch | None = None

    def epoch_starts(self) -> bool:
        """Note that an epoch has ended, if there was one, and that one starts.

        Returns:
            Whether there is time for more epochs than this one.
        """
        if self._watch is not None:
            self.epochs.append(self._watch.read())
        goes_on = self.between()
        self._watch = Stopwatch()
        return goes_on


@dataclass(frozen=True, slots=True)
class Training:
    """One training to run.

    Attributes:
        steps: Per epoch.
        epochs: Number of epochs, unless the clock ends them. The metric `SCORE` is the number of epochs trained.
        clock: Times them.
        job: What the callback gets; without one there is no callback.
        server_url: The callback's server.
        folder: Where to write, if anything.
    """

    steps: int
    epochs: int
    clock: EpochClock
    job: JobSpec | None
    server_url: str
    folder: Path


def train_lightning(training: Training) -> None:
    """Run it with Lightning.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
    """
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from zeus_plugins.lightning import ZeusBSOCallback

    class Clock(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
            trainer.should_stop = not training.clock.epoch_starts()

    class Linear(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(64, 10)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor]) -> None:  # noqa: ARG002
            self.log(SCORE, float(self.current_epoch + 1))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    images, labels = _digits(training.steps * BATCH_SIZE)
    data = TensorDataset(images, labels)
    callbacks: list[Callback] = [Clock()]
    if training.job is not None:
        callbacks.append(ZeusBSOCallback(training.job, SCORE, server_url=training.server_url, on_failure="stop"))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=training.epochs,
        callbacks=callbacks,
        default_root_dir=training.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Linear(), DataLoader(data, BATCH_SIZE), DataLoader(data, len(data)))


def train_hugging_face(training: Training) -> None:
    """Run it with the Hugging Face Trainer.

    Raises:
        ModuleNotFoundError: Transformers is not installed.
    """
    from torch import Tensor, nn
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainingArguments

    from zeus_plugins.huggingface import ZeusBSOTrainerCallback

    class Clock(TrainerCallback):
        goes_on = True

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.goes_on = training.clock.epoch_starts()

        def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
            control.should_training_stop = not self.goes_on

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(64, 10)

        def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.network(pixels)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    evaluations = iter(range(1, training.epochs + 1))
    images, labels = _digits(training.steps * BATCH_SIZE)
    data: Any = [{"pixels": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    callbacks: list[TrainerCallback] = [Clock()]
    if training.job is not None:
        callbacks.append(ZeusBSOTrainerCallback(training.job, SCORE, server_url=training.server_url, on_failure="stop"))
    trainer = Trainer(
        Linear(),
        TrainingArguments(
            str(training.folder),
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=len(data),
            num_train_epochs=training.epochs,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda _: {SCORE: float(next(evaluations))},
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _digits(length: int) -> tuple[Any, Any]:
    """Images of shape (length, 64) and labels of shape (length,), as tensors of a thread that is torch's only one."""
    import torch
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)  # more make so small a network slower, and its times vary
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:length] / 16, dtype=torch.float32), torch.tensor(labels[:length])


@contextmanager
def quiet() -> Iterator[None]:
    """Without the frameworks' remarks on so small a training, on all threads."""
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
