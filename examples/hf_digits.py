"""A Hugging Face training on images, with one or more processes, that learns which batch size is cheapest.

Usage: ``python examples/hf_digits.py [--recurrences N] [--devices N] [--data digits|mnist] [--server-url URL]
[--job-id ID]``; or, on several GPUs, ``torchrun --nproc-per-node N examples/hf_digits.py``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

import torch
from images import TARGETS, add_arguments, load
from torch import Tensor, nn
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainingArguments

from zeus_plugins import JobSpec
from zeus_plugins.huggingface import ZeusBSOTrainerCallback

MAX_EPOCHS = 20


class Classifier(nn.Module):
    """A small network that returns its loss and its logits in a dictionary, as the Trainer requires."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the cross-entropy and the logits."""
        logits = self.network(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Make a batch from rows of image and label."""
    images, labels = zip(*rows, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of images that are classified correctly."""
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


def train(options: argparse.Namespace) -> None:
    """Train once, as one recurrence of the job; in a data-parallel training, each process calls this function."""
    train_set, validation_set = load(options)
    job = JobSpec(
        job_id=options.job_id,
        job_id_prefix="digits",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=TARGETS[options.data],
        max_epochs=MAX_EPOCHS,
    )
    callback = ZeusBSOTrainerCallback(job, monitor="accuracy", server_url=options.server_url, on_failure="finish")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=Classifier(len(train_set[0][0])),
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=MAX_EPOCHS,
                per_device_eval_batch_size=256,
                learning_rate=0.003,  # at the default batch size; the callback scales it
                lr_scheduler_type="constant",
                eval_strategy="epoch",
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=train_set,
            eval_dataset=validation_set,
            data_collator=collate,
            compute_metrics=accuracy,
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if trainer.is_world_process_zero():
            trial = callback.summary
            print(f"trial {trial.trial_number}: batch size {trial.batch_size}, {trial.outcome}", flush=True)


def main() -> None:
    """Train once, or launch this script ``--recurrences`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=0, metavar="N", help="launch this script N times")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="processes that torchrun starts per launch")
    parser.add_argument("--server-url", help="default: ZEUS_SERVER_URL, or if unset, a server in this process")
    parser.add_argument("--job-id", default="digits-hf")
    add_arguments(parser)
    options = parser.parse_args()
    if not options.recurrences:
        train(options)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(options.devices)] if options.devices > 1 else []
    once = ["--job-id", options.job_id, "--data", options.data, "--data-folder", str(options.data_folder)]
    once += [] if options.server_url is None else ["--server-url", options.server_url]
    for _ in range(options.recurrences):
        subprocess.run([sys.executable, *launcher, __file__, *once], check=True)  # noqa: S603 - this very script


if __name__ == "__main__":
    main()
