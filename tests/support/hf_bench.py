"""Helpers of the tests of the Trainer's callbacks: a server with a separate job, and recording callbacks."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from tests.support.frameworks import TRAIN_IMAGES, FrameworkBench, Powered, Training, Work
from tests.support.hf_models import Classifier, Digits, Scores, quiet_trainer
from tests.support.servers import ServerProcess
from zeus_plugins.huggingface import ZeusBSOTrainerCallback, ZeusEnergyTrainerCallback, ZeusPowerLimitTrainerCallback


class Watch(TrainerCallback):
    """Record the state of the callback under test after each evaluation, and the learning rate of each step."""

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


class Run(Training):
    """A training with the Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Trainer = trainer
        self.model, self._watch = trainer.model, Watch()
        trainer.add_callback(self._watch)

    @property
    def steps(self) -> tuple[int, int]:
        return self.trainer.state.global_step, self.trainer.state.max_steps

    @property
    def epochs(self) -> float:
        epochs: float = self.trainer.state.epoch
        return epochs

    @property
    def accumulation(self) -> set[int]:
        return self._watch.accumulation

    @property
    def script(self) -> tuple[int, int]:
        return self.trainer.args.per_device_train_batch_size, self.trainer.args.gradient_accumulation_steps

    def train(self, checkpoint: Path | None = None) -> None:
        self.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def logged(self, name: str) -> list[dict[str, float]]:
        rows = [row for row in self.trainer.state.log_history if name in row]
        return [{key: value for key, value in row.items() if key.startswith("zeus/")} for row in rows]

    def left_behind(self, *callbacks: Any) -> list[str]:
        patched = {"_evaluate", "_save_checkpoint", "get_train_dataloader", "create_scheduler"} & set(
            vars(self.trainer)
        )
        return [
            *patched,
            *(name for callback in callbacks for name in vars(callback) if hasattr(TrainerCallback, name)),
        ]


class Bench(FrameworkBench):
    """Bench for the Trainer."""

    BatchSize = ZeusBSOTrainerCallback
    Energy = ZeusEnergyTrainerCallback
    PowerLimit = ZeusPowerLimitTrainerCallback
    Watch = Watch
    EPOCHS_OPTION = "num_train_epochs"

    def trainer(self, *callbacks: Any, scores: tuple[float, ...] = (), data: Any = None, **options: Any) -> Trainer:
        trainer_options = {"compute_metrics": Scores(*scores)} | (data or {})
        return quiet_trainer(self.folder, *callbacks, trainer_options=trainer_options, **options)

    def training(
        self,
        *callbacks: Any,
        work: Work | None = None,
        scores: tuple[float, ...] = (),
        epochs: int = 1,
        size: int = 16,
        samples: int = TRAIN_IMAGES,
        accumulation: int = 1,
        validate_every: int | None = None,
        save_every: int | None = None,
        data: Any = None,
        **options: Any,
    ) -> Run:
        work = work or Work()
        if validate_every is not None:
            options |= {"eval_strategy": "steps", "eval_steps": validate_every}
        if save_every is not None:
            options |= (
                {"save_strategy": "steps", "save_steps": save_every} if save_every else {"save_strategy": "epoch"}
            )
        defaults = {
            "model": Classifier(work),
            "compute_metrics": Scores(*scores, work=work),
            "train_dataset": Digits(length=samples),
        }
        trainer = self.trainer(
            *callbacks,
            data=defaults | (data or {}),
            num_train_epochs=epochs,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            **options,
        )
        return Run(trainer)

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def saved_trial(self, step: int) -> dict[str, Any]:
        state = json.loads((self.checkpoint(step) / "trainer_state.json").read_text())
        trial: dict[str, Any] = state["stateful_callbacks"]["zeus_bso"]["trial"]
        return trial

    def forking(self, *, stay: bool) -> dict[str, Any]:
        return {"dataloader_num_workers": 2, "dataloader_persistent_workers": stay}

    def slow_saver(self, work: Powered) -> Any:
        class Slow(TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
                work.be_slow()

        return Slow()


@pytest.fixture(name="bench")
def make_bench(shared_server: ServerProcess, tmp_path: Path) -> Bench:
    return Bench(shared_server, f"digits-{uuid.uuid4().hex}", tmp_path)


def sizes_of(trainer: Trainer) -> list[int]:
    model: Any = trainer.model
    return list(model.seen_sizes)
