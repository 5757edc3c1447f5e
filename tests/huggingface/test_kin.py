"""The callback in trainers built on the Hugging Face one: TRL, PEFT, sentence-transformers, SetFit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")
    for package in ("trl", "peft", "sentence_transformers", "setfit"):
        pytest.importorskip(package, reason=f"{package} is in the extra integrations")

from transformers import TrainerCallback

from tests.support import hf_kin
from tests.support.hf_bench import Bench
from tests.support.hf_kin import WAYS
from tests.support.job_bench import SERVERS_SIZE
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import TrialState

pytestmark = [
    pytest.mark.slow,
    # These packages warn about their own code or about each other.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EASY = {"target": 1e9, "higher_is_better_metric": False}
# The model sees this number of samples for each sample of a batch: both texts of a pair.
PAIRED = {"TRL's DPOTrainer", "TRL's RewardTrainer"}


@pytest.mark.parametrize("name", WAYS)
def test_kindred_trainer_trains_at_size_of_server(bench: Bench, name: str) -> None:
    make, monitor = WAYS[name]
    callback = bench.callback(bench.job(**EASY), monitor)
    trainer, train = made if isinstance(made := make(bench.folder, callback), tuple) else (made, made.train)
    sizes = hf_kin.counted(trainer)
    train()
    expected = SERVERS_SIZE * (2 if name in PAIRED else 1) // (2 if "accumulating" in name else 1)
    full = [size for size in sizes if size == expected]
    assert len(full) >= max(2, len(sizes) - 2), sizes
    assert max(sizes) == expected
    assert bench.only_trial().state is TrialState.COMPLETED


def test_grpo_refuses_group_splitting_sizes_before_trial(bench: Bench) -> None:
    callback = bench.callback(bench.job(batch_sizes=(42, SERVERS_SIZE), **EASY), "eval_reward")
    trainer = hf_kin.grpo(bench.folder, callback)
    with pytest.raises(ZeusBSOConfigError, match=r"num_generations=4 .* sizes \[42\] .* choose multiples of 4"):
        trainer.train()
    assert not bench.is_registered()


class GenerationWatch(TrainerCallback):
    """Records for how many steps a trainer generates at once, and how many completions."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.seen.add((args.steps_per_generation, args.generation_batch_size))


def test_grpo_keeps_steps_per_generation_and_restores_own_numbers(bench: Bench) -> None:
    callback = bench.callback(bench.job(**EASY), "eval_reward", max_per_device_batch_size=24)
    trainer = hf_kin.grpo(bench.folder, callback, steps_per_generation=2)
    watch = GenerationWatch()
    trainer.add_callback(watch)
    sizes = hf_kin.counted(trainer)
    trainer.train()
    assert set(sizes) == {SERVERS_SIZE // 2}
    assert watch.seen == {(4, 2 * SERVERS_SIZE)}
    assert (trainer.args.steps_per_generation, trainer.args.generation_batch_size) == (2, 32)


def test_negatives_within_batch_are_warned_about(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "zeus_plugins"):
        hf_kin.sentences(tmp_path, bench.callback(bench.job(**EASY), "eval_loss")).train()
    (warning,) = [record.getMessage() for record in caplog.records if "negative" in record.getMessage()]
    assert warning.startswith("MultipleNegativesRankingLoss takes the other samples of a batch as negative examples")


def test_callback_attaches_to_own_trainer_of_setfit(bench: Bench) -> None:
    callback = bench.callback(bench.job(**EASY), "eval_embedding_loss")
    trainer, data = hf_kin.setfit_trainer(bench.folder)
    callback.attach(trainer.st_trainer)
    sizes = hf_kin.counted(trainer.st_trainer)
    trainer.train_embeddings(*data, *data)
    assert set(sizes[:-1]) == {SERVERS_SIZE}
