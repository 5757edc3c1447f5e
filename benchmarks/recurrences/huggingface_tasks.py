"""The trainings with the Hugging Face Trainer, with untrained models that are made from configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from benchmarks.recurrences import data
from benchmarks.recurrences.runs import Curve, Run
from benchmarks.recurrences.tasks import GPU
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.training.trial import TrialInfo

PRETRAINED = "pretrained.pt"
"""File with the weights from which task ``fine-tuning`` starts, in the folder of a measurement."""

_PRETRAINING_STEPS = 25

_WARMUP_EPOCHS = 2.0
"""Epochs of learning-rate warm-up in the tasks for a GPU."""


class _Samples(Dataset[dict[str, Tensor]]):
    """A dataset of inputs and labels in the format that a Trainer expects."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self._inputs[place], "labels": self._labels[place]}


class _Drawn(Dataset[dict[str, Tensor]]):
    """A dataset of new blocks at each reading; the labels of a language model are its inputs."""

    def __init__(self, texts: data.Bytes, samples: int) -> None:
        self._texts, self._samples = texts, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        block = self._texts.draw()
        return {"input_ids": block, "labels": block}


def train(run: Run) -> TrialInfo | None:
    """Train once; return the trial, or None without the callback."""
    task, order = run.task, run.order
    samples, model, lr, texts = _making(run)
    epochs = order.epochs or task.max_epochs
    callbacks: list[TrainerCallback] = []
    zeus = None
    if order.with_callback:
        zeus = ZeusBSOTrainerCallback(monitor=task.metric, **order.arguments)
        callbacks.append(zeus)
    if run.curve is not None:
        callbacks.append(_Watching(task.metric, run.curve))
    is_classifier = task.metric == "eval_accuracy"
    # Linear is the default of `TrainingArguments`.
    schedule = "linear" if task.name == "fine-tuning" else "constant"
    on_gpu = task.device == GPU and torch.cuda.is_available()
    trainer = Trainer(
        model,
        TrainingArguments(
            str(run.folder),
            num_train_epochs=epochs,
            per_device_train_batch_size=run.batch_size,
            per_device_eval_batch_size=128,
            learning_rate=lr,
            # Without warm-up, an untrained model with twelve post-norm layers may never start to learn.
            lr_scheduler_type="constant_with_warmup" if task.device == GPU else schedule,
            warmup_steps=min(0.5, _WARMUP_EPOCHS / epochs) if task.device == GPU else 0,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not on_gpu,
            bf16=on_gpu,
            seed=order.seed,
            dataloader_pin_memory=on_gpu,
            prediction_loss_only=not is_classifier,
        ),
        train_dataset=_Samples(*samples.train) if texts is None else _Drawn(texts, task.samples),
        eval_dataset=_Samples(*samples.validation),
        compute_metrics=_accuracy if is_classifier else None,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return None if zeus is None else zeus.trial


class _Watching(TrainerCallback):
    """A callback that records each epoch's metric, and ends the training when the curve is complete."""

    def __init__(self, metric: str, curve: Curve) -> None:
        self._metric, self._curve = metric, curve

    def on_evaluate(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the hook's signature
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Record the metric of the epoch that has been evaluated."""
        control.should_training_stop = self._curve.add((metrics or {})[self._metric])


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of the texts that are classified correctly."""
    guesses: Any = prediction.predictions
    return {"accuracy": float((guesses.argmax(axis=-1) == prediction.label_ids).mean())}


def _making(run: Run) -> tuple[data.Data, PreTrainedModel, float, data.Bytes | None]:
    """Return the data, the model, the learning rate at the default size, and the source of training data on a GPU."""
    seed, shrink = run.order.seed, run.task.shrink
    if run.task.name == "characters":
        blocks = data.characters(seed)
        return blocks, _gpt2(blocks.vocabulary, width=32, layers=1, heads=2, length=data.BLOCK), 0.003, None
    if run.task.name == "topics":
        excerpts = data.excerpts(seed)
        return excerpts, _bert(excerpts, width=32, layers=1, heads=2, length=data.BLOCK), 0.001, None
    if run.task.name == "fine-tuning":
        return (*_pretrained(run), 5e-5, None)
    length = max(16, 512 // shrink**2)
    texts = data.Bytes(seed, length)
    held_out = torch.stack([texts.draw(is_train=False) for _ in range(128)])
    width, layers = max(64, 1024 // shrink**2), max(1, 24 // shrink**2)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU would take seconds for random weights
        model = _gpt2(256, width=width, layers=layers, heads=16, length=length)
    return data.Data((held_out, held_out), (held_out, held_out), vocabulary=256), model, 0.0003 * shrink, texts


def _pretrained(run: Run) -> tuple[data.Data, PreTrainedModel]:
    """Return data of one half of the texts, and a model pretrained on the other half, with an untrained last layer."""
    excerpts = data.excerpts(run.order.seed, samples=600, validation=300, classes=2, half=1)
    model = _bert(excerpts, width=64, layers=1, heads=2, length=data.BLOCK)
    model.bert.load_state_dict(torch.load(run.measurement / PRETRAINED, weights_only=True))
    return excerpts, model


def pretrain(weights: Path) -> None:
    """Write the weights of a small BERT that has learned the topics of one half of the texts."""
    torch.manual_seed(0)
    texts = data.excerpts(0, samples=4_000, classes=2, half=0)
    model = _bert(texts, width=64, layers=1, heads=2, length=data.BLOCK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    inputs, labels = texts.train
    for _ in range(_PRETRAINING_STEPS):
        places = torch.randint(len(inputs), (32,))
        model(input_ids=inputs[places], labels=labels[places]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.bert.state_dict(), weights)


def _gpt2(vocabulary: int, *, width: int, layers: int, heads: int, length: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _bert(texts: data.Data, *, width: int, layers: int, heads: int, length: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=texts.vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    config.num_labels = texts.classes
    return BertForSequenceClassification(config)
