"""Trainings that lose their server, as processes of their own.

Usage: ``python -m tests.support.outage_training FRAMEWORK SERVER_URL FOLDER SCENARIO…``.
Each scenario is one training with a
job of that name. At each of its points (``SCENARIO.POINT``) a training makes a file of that name in the folder and
waits until the file is gone, so that whoever started it may strike there. What each training saw is written to
``FOLDER/SCENARIO.json``.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.job_bench import seconds_and_joules
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOTrainFailError

EPOCHS = 4
SIZES = (24, 48)
DEFAULT_SIZE = 48
# Of a training that reaches its target; that of any other is out of reach.
REACHED = 0.9
FRAMEWORKS = ("plain", "lightning", "huggingface")

Meet = Callable[[str], None]
"""Waits at a point: ``start`` before anything, ``dispatched``, and ``epoch K`` before the K-th report."""


def score_after(epoch: int) -> float:
    """The metric: the target is reached with the last epoch."""
    return epoch / EPOCHS


def job_of(scenario: str) -> JobSpec:
    target = 2.0 if "never" in scenario else REACHED
    return JobSpec(
        job_id=scenario,
        job_id_prefix=scenario,
        batch_sizes=SIZES,
        default_batch_size=DEFAULT_SIZE,
        target_metric=target,
        max_epochs=EPOCHS,
        beta_knob=None,
    )


def plain(server_url: str, job: JobSpec, meet: Meet) -> dict[str, Any]:
    with BatchSizeOptimizer(seconds_and_joules(1.0, 10.0), server_url, job) as optimizer:
        size = optimizer.get_batch_size()
        meet("dispatched")
        optimizer.on_train_begin()
        epoch = 0
        while not optimizer.training_finished:
            epoch += 1
            meet(f"epoch {epoch}")
            optimizer.on_evaluate(score_after(epoch))
    return {"size": size, "epochs": epoch}


def lightning(server_url: str, job: JobSpec, meet: Meet) -> dict[str, Any]:
    from tests.support.lightning_models import Classifier, quiet_trainer, train_loader
    from zeus_plugins.lightning import ZeusBSOCallback

    class Scored(Classifier):
        def on_train_start(self) -> None:
            meet("dispatched")

        def validation_step(self, batch: Any) -> None:
            super().validation_step(batch)
            if not self.trainer.sanity_checking:
                meet(f"epoch {self.current_epoch + 1}")

    callback = ZeusBSOCallback(job, "score", server_url=server_url, energy_monitor=seconds_and_joules(1.0, 10.0))
    trainer = quiet_trainer(callback, max_epochs=EPOCHS)
    model = Scored(*(score_after(epoch) for epoch in range(1, EPOCHS + 1)))
    trainer.fit(model, train_loader())
    return {"size": callback.trial.batch_size, "epochs": trainer.current_epoch}


def huggingface(server_url: str, job: JobSpec, meet: Meet) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tests.support.hf_models import Classifier, Digits, val_digits
    from zeus_plugins.huggingface import ZeusBSOTrainerCallback

    epochs = 0

    class Meeting(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meet("dispatched")

    def compute_metrics(_: Any) -> dict[str, float]:
        nonlocal epochs
        epochs += 1
        meet(f"epoch {epochs}")
        return {"accuracy": score_after(epochs)}

    callback = ZeusBSOTrainerCallback(
        job, "accuracy", server_url=server_url, energy_monitor=seconds_and_joules(1.0, 10.0)
    )
    arguments = TrainingArguments(
        output_dir="unused",
        num_train_epochs=EPOCHS,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(
        Classifier(),
        arguments,
        train_dataset=Digits(),
        eval_dataset=val_digits(),
        compute_metrics=compute_metrics,
        callbacks=[callback, Meeting()],
    )
    trainer.train()
    return {"size": callback.trial.batch_size, "epochs": epochs}


def main(framework: str, server_url: str, folder: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the frameworks' advice on such small trainings
    train = {"plain": plain, "lightning": lightning, "huggingface": huggingface}[framework]
    for scenario in scenarios:

        def meet(point: str, scenario: str = scenario) -> None:
            here = folder / f"{scenario}.{point}"
            here.touch()
            while here.exists():
                time.sleep(0.01)

        meet("start")
        try:
            seen = train(server_url, job_of(scenario), meet)
        except ZeusBSOTrainFailError as error:
            seen = {"error": type(error).__name__, "message": str(error)}
        partial = folder / f"{scenario}.partial"
        partial.write_text(json.dumps(seen))
        partial.replace(folder / f"{scenario}.json")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
