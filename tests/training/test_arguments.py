"""Arguments of the batch-size callbacks, including the mistakes of users of EarlyStopping and the trainers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from transformers import Trainer, TrainingArguments

from tests.support.lightning_bench import Classifier, quiet_trainer, train_loader
from zeus_plugins import JobSpec
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.lightning import ZeusBSOCallback

each_callback = pytest.mark.parametrize("callback", [ZeusBSOCallback, ZeusBSOTrainerCallback])
JOB = JobSpec(job_id_prefix="mnist", batch_sizes=(32, 64), default_batch_size=32, target_metric=0.9, max_epochs=3)


@each_callback
def test_metric_is_positional_and_options_are_named(callback: Any) -> None:
    said = callback("val_acc", target=0.97, mode="max", batch_sizes=[64, 16], max_epochs=20)._wish
    fields = {"target_metric": 0.97, "higher_is_better_metric": True, "batch_sizes": (16, 64), "max_epochs": 20}
    assert (said.monitor, said.fields) == ("val_acc", fields)
    same = callback(monitor="val_acc", target=0.97, mode="max", batch_sizes=(16, 64), max_epochs=20)._wish
    assert vars(said) == vars(same)
    for job in (JOB, dict(JOB)):
        said = callback(job, "val_acc")._wish
        assert (said.job, said.monitor) == (JOB, "val_acc")


@each_callback
@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"probe": "off"}, "has no probe=: trainings no longer time other batch sizes: leave it out"),
        ({"energy_scope": "node"}, "has no energy_scope=: the energy of the training devices counts"),
        ({"token": "zbso_1"}, "has no token=: set the environment variable ZEUS_BSO_TOKEN or ZEUS_BSO_TOKEN_FILE"),
        ({"quiet": True}, r"has no quiet=: logging\.getLogger\('zeus_plugins'\)\.setLevel\('WARNING'\) leaves out"),
        ({"restart": True}, "has no restart=: on_failure='finish' continues from the present weights"),
        ({"strict": True}, "has no strict=: another model, framework, optimizer or metric is a warning"),
        ({"on_unreachable": "raise"}, "has no on_unreachable=: a training always begins, at the default size"),
        ({"metric": "val_acc"}, "has no metric=: the metric is the first argument, or monitor="),
        ({"higher_is_better_metric": True}, "has no higher_is_better_metric=: say mode='max' if"),
        ({"greater_is_better": True}, "say mode='max' if"),
        ({"patience": 3}, "has no patience=: there is no equivalent: .* say confirm=…"),
        ({"min_delta": 0.01}, "has no min_delta=: there is no equivalent"),
        ({"sizes": [8]}, r"has no sizes=: say batch_sizes=\[…\]"),
        ({"batch_size": 8}, r"has no batch_size=: say batch_sizes=\[…\]"),
        ({"num_train_epochs": 8}, "has no num_train_epochs=: say max_epochs="),
        ({"stopping_threshold": 0.9}, "has no stopping_threshold=: say target="),
        ({"eta_knob": 1.0}, r"has no eta_knob=: it is a field of a job, job=\{'eta_knob': …\}"),
        (
            {"max_epoch": 3, "sever_url": ""},
            "max_epoch=: did you mean max_epochs=.*sever_url=: did you mean server_url=",
        ),
        ({"frobnicate": 3}, "has no frobnicate=: docs/reference.md lists the arguments"),
    ],
)
def test_wrong_argument_name_is_answered_with_the_right_name(callback: Any, said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        callback("val_acc", target=0.9, **said)


@each_callback
@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"target": "0.97"}, "target is '0.97': give a finite number, without quotes: 0.97"),
        ({"target": "high"}, "target is 'high': give a finite number"),
        ({"target": float("nan")}, "target is nan: give a finite number"),
        ({"target": float("inf")}, "target is inf: give a finite number"),
        ({"target": True}, "target is True: give a finite number"),
        ({"batch_sizes": ["16", "32"]}, "one of batch_sizes is '16': give a whole number above 0, without quotes: 16"),
        ({"batch_sizes": [0, 32]}, "one of batch_sizes is 0: give a whole number above 0"),
        ({"batch_sizes": [16.5]}, "one of batch_sizes is 16.5: give a whole number above 0"),
        (
            {"batch_sizes": []},
            "batch_sizes is []: give a list of different whole numbers above 0, such as [16, 32, 64]",
        ),
        ({"batch_sizes": 32}, "batch_sizes is 32: give a list of different whole numbers above 0"),
        ({"batch_sizes": "16,32"}, "batch_sizes is '16,32': give a list of different whole numbers above 0"),
        ({"batch_sizes": [16, 16]}, "batch_sizes is [16, 16]: give a list of different whole numbers above 0"),
        ({"max_epochs": "20"}, "max_epochs is '20': give a whole number above 0, without quotes: 20"),
        ({"max_epochs": 2.5}, "max_epochs is 2.5: give a whole number above 0"),
        ({"confirm": "2"}, "confirm is '2': give a whole number above 0, without quotes: 2"),
        ({"max_per_device_batch_size": "64"}, "max_per_device_batch_size is '64': give a whole number above 0"),
        ({"mode": "auto"}, "mode is 'auto': say 'max' if the metric rises as the model improves, or 'min' if it falls"),
        ({"job_id": "my job"}, "job_id is 'my job': give 1 to 255 of the characters"),
        ({"job_id": 7}, "job_id is 7: give 1 to 255 of the characters"),
        (
            {"server_url": "sqlite:///bso.db"},
            "server_url begins with sqlite://, and must be http:// or https:// with a",
        ),
        ({"server_url": "localhost:8000"}, "server_url must be http:// or https:// with a host"),
        ({"monitor": None}, "monitor is None: give the name by which the target's metric is logged"),
    ],
)
def test_invalid_argument_is_refused_by_the_constructor(callback: Any, said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"^{re.escape(problem)}"):
        callback(**{"monitor": "val_acc", "target": 0.9, **said})


def test_class_or_callback_of_the_wrong_framework_is_refused(tmp_path: Path) -> None:
    mistakes: list[tuple[Any, str]] = [
        (ZeusBSOTrainerCallback, "callbacks=[ZeusBSOTrainerCallback('val_acc', …)], not the class"),
        (ZeusBSOCallback, "callbacks=[ZeusBSOCallback('val_acc', …)], not the class"),
        (ZeusBSOCallback("val_acc"), "give the Hugging Face Trainer zeus_plugins.huggingface.ZeusBSOTrainerCallback"),
    ]
    for mistaken, problem in mistakes:
        with pytest.raises(ZeusBSOConfigError, match=re.escape(problem)):
            Trainer(torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path)), callbacks=[mistaken])
    with pytest.raises(ZeusBSOConfigError, match="the Trainer was given the class ZeusBSOCallback: give it an object"):
        quiet_trainer(ZeusBSOCallback).fit(Classifier(), train_loader())
    trainer = quiet_trainer(ZeusBSOTrainerCallback("val_acc"))
    with pytest.raises(ZeusBSOConfigError, match=r"give Lightning's zeus_plugins\.lightning\.ZeusBSOCallback"):
        trainer.fit(Classifier(), train_loader())
