"""The bench of the Hugging Face Trainer: small trainings on scikit-learn's digits, with every kind of data argument.

The user of these trainings states `USERS_SIZE` everywhere; a trial at another size shows that the callback set it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from tests.support.frameworks import (
    TRAIN_IMAGES,
    VAL_IMAGES,
    FrameworkBench,
    Plan,
    Powered,
    Training,
    Work,
    digit_tensors,
)
from tests.support.odd_sizes import FixedLength
from tests.support.servers import ServerProcess
from zeus_plugins.huggingface import ZeusBSOTrainerCallback, ZeusEnergyTrainerCallback, ZeusPowerLimitTrainerCallback

USERS_SIZE = 16

Example = dict[str, Tensor]


class Digits(Dataset[Example]):
    """Some of the images in the format of a Trainer."""

    def __init__(self, first: int = 0, length: int = TRAIN_IMAGES) -> None:
        self._first, self._length = first, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Example:
        images, labels = digit_tensors()
        return {"pixels": images[self._first + index], "labels": labels[self._first + index]}


class BatchItems(Dataset[Example]):
    """Each item is a batch of twelve images."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Example:
        images, labels = digit_tensors()
        return {"pixels": images[index : index + 12], "labels": labels[index : index + 12]}


class Stream(IterableDataset[Example]):
    """Stream of images with unknown length."""

    def __iter__(self) -> Iterator[Example]:
        data = Digits()
        return (data[index] for index in range(len(data)))


class Tokens(Dataset[Example]):
    """The images as rows of tokens, for models of language."""

    def __init__(self, *, to_sequence: bool = False) -> None:
        self._to_sequence = to_sequence

    def __len__(self) -> int:
        return TRAIN_IMAGES

    def __getitem__(self, index: int) -> Example:
        if index >= len(self):  # ends a loop over a data set
            raise IndexError(index)
        images, labels = digit_tensors()
        tokens = (images[index, :8] * 16).long()
        return {"input_ids": tokens, "labels": tokens[:4] if self._to_sequence else labels[index]}


def val_digits() -> Digits:
    return Digits(TRAIN_IMAGES, VAL_IMAGES)


class Counting(nn.Module):
    """Mixin that records the batches of a training."""

    def note(self, batch: Tensor) -> None:
        sizes: list[int] = vars(self).setdefault("seen_sizes", [])
        if self.training:
            sizes.append(len(batch))


class Classifier(Counting):
    """A linear classifier that records the size of each training batch and then does its `work`."""

    def __init__(self, work: Work | None = None) -> None:
        super().__init__()
        self.network = nn.Linear(64, 10)
        self.seen_sizes: list[int] = []
        self._work = work or Work()

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.note(pixels)
        if self.training:
            self._work.batch()
        logits = self.network(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class CountingBert(BertForSequenceClassification, Counting):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.note(input_ids)
        return super().forward(input_ids, labels=labels)


class CountingT5(T5ForConditionalGeneration, Counting):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.note(input_ids)
        return super().forward(input_ids, labels=labels)


def tiny_bert() -> CountingBert:
    config = BertConfig(
        vocab_size=17,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    config.num_labels = 10
    return CountingBert(config)


def tiny_t5() -> CountingT5:
    known: Any = T5Config  # only its own fields are declared
    return CountingT5(
        known(vocab_size=17, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


class Scores:
    """`compute_metrics` with a given score per evaluation; the last score is repeated."""

    def __init__(self, *scores: float, work: Work | None = None) -> None:
        self._scores = list(scores or (0.0,))
        self._work = work or Work()

    def __call__(self, prediction: Any) -> dict[str, float]:
        self._work.validation()
        accuracy = float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())
        score = self._scores.pop(0) if len(self._scores) > 1 else self._scores[0]
        return {"accuracy": accuracy, "score": score}


class HardCodedTrainer(Trainer):
    """Trainer with a batch size in its code and a loader that accelerate never sees."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=16)


class FixedLengthTrainer(Trainer):
    """Trainer with a sampler that follows its size, but not in its length."""

    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        return self.accelerator.prepare(DataLoader(data, batch_sampler=FixedLength(), collate_fn=self.data_collator))


class PreparedTrainer(Trainer):
    """Trainer with a batch size in its code and a loader that accelerate prepares."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=16, shuffle=True))


class BuiltOnceTrainer(Trainer):
    """Trainer that returns the same loader repeatedly."""

    loader: Any = None

    def get_train_dataloader(self) -> Any:
        self.loader = self.loader or super().get_train_dataloader()
        return self.loader


QUIET: dict[str, Any] = {
    "per_device_train_batch_size": USERS_SIZE,
    "per_device_eval_batch_size": VAL_IMAGES,
    "num_train_epochs": 1,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "logging_strategy": "no",
    "learning_rate": 0.1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}


def quiet_arguments(folder: Path, **options: Any) -> Seq2SeqTrainingArguments:
    given = {"output_dir": str(folder), **QUIET, **options}
    # Any Trainer accepts these arguments; Seq2SeqTrainer accepts no others.
    return Seq2SeqTrainingArguments(**given)


def quiet_trainer(
    folder: Path,
    *callbacks: Any,
    kind: type[Trainer] = Trainer,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """Return a trainer of a `Classifier` with these training arguments."""
    defaults: dict[str, Any] = {
        "train_dataset": Digits(),
        "eval_dataset": val_digits(),
        "compute_metrics": Scores(),
        "callbacks": list(callbacks),
    }
    given = defaults | (trainer_options or {})
    if "model" not in given and "model_init" not in given:
        given["model"] = Classifier()
    return kind(args=quiet_arguments(folder, **options), **given)


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

    def _make(self, callbacks: tuple[Any, ...], plan: Plan, options: dict[str, Any]) -> Run:
        if plan.validate_every is not None:
            options |= {"eval_strategy": "steps", "eval_steps": plan.validate_every}
        if plan.save_every is not None:
            options |= {"save_strategy": "epoch"}
        if plan.save_every:
            options |= {"save_strategy": "steps", "save_steps": plan.save_every}
        defaults = {
            "model": Classifier(plan.work),
            "compute_metrics": Scores(*plan.scores, work=plan.work),
            "train_dataset": Digits(length=plan.samples),
        }
        trainer = self.trainer(
            *callbacks,
            data=defaults | (plan.data or {}),
            num_train_epochs=plan.epochs,
            per_device_train_batch_size=plan.size,
            gradient_accumulation_steps=plan.accumulation,
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
        return {"dataloader_num_workers": 1, "dataloader_persistent_workers": stay}

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
