"""Trainings that lose their server at certain points."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.job_bench import seconds_and_joules
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOTrainFailError

EPOCHS = 4
SIZES = (24, 48)
DEFAULT_SIZE = 48
# Target of a training that reaches its target; other targets are out of reach.
REACHED = 0.9

Meet = Callable[[str], None]
"""Told of a point before the training goes on: ``start``, ``dispatched``, and ``epoch K`` before the K-th report."""


def score_after(epoch: int) -> float:
    """Return the metric, which reaches the target in the last epoch."""
    return epoch / EPOCHS


def job_of(scenario: str) -> JobSpec:
    target = 2.0 if "never" in scenario else REACHED
    return JobSpec(
        job_id=scenario,
        job_id_prefix=scenario,
        batch_sizes=SIZES,
        default_batch_size=DEFAULT_SIZE,
        target_metric=target,
        higher_is_better_metric=True,
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
    from tests.support.lightning_bench import Classifier, quiet_trainer, train_loader
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
    from transformers import TrainerCallback

    from tests.support.hf_bench import quiet_trainer
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
    options = {"compute_metrics": compute_metrics}
    quiet_trainer(Path("unused"), callback, Meeting(), trainer_options=options, num_train_epochs=EPOCHS).train()
    return {"size": callback.trial.batch_size, "epochs": epochs}


TRAININGS: dict[str, Callable[[str, JobSpec, Meet], dict[str, Any]]] = {
    "plain": plain,
    "lightning": lightning,
    "huggingface": huggingface,
}


def train(framework: str, server_url: str, scenario: str, meet: Meet) -> dict[str, Any]:
    """Train a job with the scenario's name; return its observations."""
    meet("start")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the frameworks' advice on small trainings
        try:
            return TRAININGS[framework](server_url, job_of(scenario), meet)
        except ZeusBSOTrainFailError as error:
            return {"error": type(error).__name__, "message": str(error)}
