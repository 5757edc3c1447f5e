"""FSDP with the Hugging Face Trainer, two processes on the CPU."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from tests.support.hf_bench import TRAIN_IMAGES, USERS_SIZE, Tokens, quiet_trainer, tiny_bert
from tests.support.job_bench import NEXT_SIZE, SERVERS_SIZE, JobBench, seconds_and_joules
from tests.support.process_end import leave
from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess
from tests.support.warm import TRANSFORMERS
from zeus_plugins import JobSpec
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.protocol import TrialState

RATE = 0.1  # for the job's default size

FSDP: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}}


class LatestRates(TrainerCallback):
    """Record the rates of the latest step, because rates of reused optimizers are restored after the training."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.rates = [group["lr"] for group in kwargs["optimizer"].param_groups]


# Arguments of the Trainer, and of the callback.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": (FSDP, {}),
    "fsdp scaled": (FSDP, {"lr_scaling": "sqrt"}),
    "fsdp accumulation": ({**FSDP, "gradient_accumulation_steps": 2}, {}),
}


def shard_on_the_cpu() -> None:
    """Let accelerate shard models as FSDP does; accelerate skips this without a GPU, although torch supports it."""
    construct = AcceleratorState.__init__

    @functools.wraps(construct)
    def construct_sharding(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    vars_of_class: Any = AcceleratorState
    vars_of_class.__init__ = construct_sharding


def train(server_url: str, job_id: str, folder: Path, way: str) -> dict[str, Any]:
    """Train one epoch.

    Returns:
        Observations of this process.
    """
    job = JobSpec.model_validate_json((folder / "job.json").read_text())
    job = job.model_copy(update={"job_id": job_id})
    options, arguments = WAYS[way]
    monitor = seconds_and_joules(1.0, 10.0)
    callback = ZeusBSOTrainerCallback(job, "score", server_url=server_url, energy_monitor=monitor, **arguments)
    latest = LatestRates()
    trainer = quiet_trainer(
        folder / "checkpoints",
        callback,
        latest,
        ddp_backend="gloo",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        trainer_options={"model": tiny_bert(), "train_dataset": Tokens(), "eval_dataset": Tokens()},
        **options,
    )
    trainer.train()
    weights = trainer.optimizer.param_groups[0]["params"]  # type: ignore[union-attr, unused-ignore]
    model: Any = trainer.model
    return {
        "rank": trainer.args.process_index,
        "is_sharded": all(isinstance(each, DTensor) for each in weights),
        "sizes": vars(model).get("seen_sizes", []),
        "steps": trainer.state.global_step,
        "rates": latest.rates,
        "size_afterwards": trainer.args.per_device_train_batch_size,
        "rate_afterwards": trainer.args.learning_rate,
    }


def main(server_url: str, job_id: str, folder: str, *ways: str) -> None:
    """Train each way, and write the observations to a file per process and way."""
    torch.set_num_threads(1)
    shard_on_the_cpu()
    for way in ways:
        seen = train(server_url, f"{job_id}-{way.replace(' ', '-')}", Path(folder), way)
        Path(folder, f"{way} {seen['rank']}.json").write_text(json.dumps(seen))
    leave()


pytestmark = pytest.mark.slow

SCALED = RATE * math.sqrt(NEXT_SIZE / SERVERS_SIZE)


@dataclass
class Ran:
    """The records of two processes that trained in several ways, each the second trial of a job."""

    server: ServerProcess
    folder: Path

    def seen(self, way: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{way} {rank}.json").read_text()) for rank in range(2)]

    def bench(self, way: str) -> JobBench:
        return JobBench(self.server, f"digits-{way.replace(' ', '-')}")


@pytest.fixture(scope="module", name="ran")
def train_in_all_ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("ran")
    server = ServerProcess(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    ran = Ran(server, folder)
    for way in WAYS:
        job = ran.bench(way).job(higher_is_better_metric=True)
        (folder / "job.json").write_text(job.model_dump_json())
        ran.bench(way).complete_first_trial(job)
    ended = run_ranks(
        *("tests.huggingface.test_sharded", server.url, "digits", str(folder), *WAYS),
        modules=TRANSFORMERS,
        output=folder / "output",
    )
    assert not any(ended), (folder / "output").read_text()
    yield ran
    server.kill()


@pytest.mark.parametrize("way", WAYS)
def test_both_processes_train_at_size_of_server(ran: Ran, way: str) -> None:
    accumulation = WAYS[way][0].get("gradient_accumulation_steps", 1)
    scales = "lr_scaling" in WAYS[way][1]
    for seen in ran.seen(way):
        assert set(seen["sizes"]) == {NEXT_SIZE // 2 // accumulation}
        assert seen["steps"] == TRAIN_IMAGES // NEXT_SIZE
        assert seen["is_sharded"]
        assert seen["rates"]
        assert seen["rates"] == pytest.approx([SCALED if scales else RATE] * len(seen["rates"]))
        assert (seen["size_afterwards"], seen["rate_afterwards"]) == (USERS_SIZE, RATE)
    trial = ran.bench(way).view().trials[1]
    assert (trial.state, trial.batch_size) == (TrialState.COMPLETED, NEXT_SIZE)


if __name__ == "__main__":
    main(*sys.argv[1:])
