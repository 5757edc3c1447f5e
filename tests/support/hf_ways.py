"""Data and arguments of the Trainer in trainings on two processes."""

from __future__ import annotations

from typing import Any

from tests.support.hf_models import HardCodedTrainer, PreparedTrainer, Stream

STREAM: dict[str, Any] = {"data": {"train_dataset": Stream()}, "max_steps": 3}
WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 2},
    "prepared": {"kind": PreparedTrainer},
    "raw": {"kind": HardCodedTrainer},
    "split": {"accelerator_config": {"split_batches": True}},
    "split prepared": {"kind": PreparedTrainer, "accelerator_config": {"split_batches": True}},
    "dispatch": {"accelerator_config": {"dispatch_batches": True}},
    "split dispatch": {"accelerator_config": {"dispatch_batches": True, "split_batches": True}},
    "stream": STREAM,
    "stream in shares": {**STREAM, "accelerator_config": {"dispatch_batches": False}},
    "stream split": {**STREAM, "accelerator_config": {"dispatch_batches": False, "split_batches": True}},
}
