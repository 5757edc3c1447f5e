"""Lightning's strategies that spread a model over processes, or spawn them, as far as they run without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support import warm
from tests.support.job_bench import EPOCH_OF_24, EPOCH_OF_48
from tests.support.lightning_bench import Bench, Classifier, HardCodedData, Loader, quiet_trainer, train_loader
from tests.support.process_end import leave
from tests.support.ranks import run_ranks
from tests.support.warm import LIGHTNING
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import TrialState


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data_parallel", "tensor_parallel", "sizes"),
    [(2, 1, [*EPOCH_OF_24[:-4], 12]), (1, 2, EPOCH_OF_48)],
    ids=["sharded", "tensor parallel"],
)
def test_model_spread_over_processes_trains_at_size_of_server(
    bench: Bench, tmp_path: Path, data_parallel: int, tensor_parallel: int, sizes: list[int]
) -> None:
    arguments = [bench.server.url, bench.job_id, str(tmp_path), str(data_parallel), str(tensor_parallel)]
    output = tmp_path / "output"
    ended = run_ranks("tests.lightning.test_sharded", *arguments, modules=LIGHTNING, output=output)
    assert ended == [0, 0], output.read_text()
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [sizes] * 2
    assert bench.only_trial().state is TrialState.COMPLETED


@pytest.mark.slow
def test_spawned_processes_share_trial(bench: Bench, tmp_path: Path) -> None:
    ended = warm.run("tests.lightning.test_sharded", bench.server.url, bench.job_id, str(tmp_path), modules=LIGHTNING)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {"sizes": [24, 24, 24, 12], "steps": 4}
    assert bench.only_trial().state is TrialState.COMPLETED
    # The callback with the trial ended with its process.
    assert "spawned processes" in json.loads((tmp_path / "parent.json").read_text())


# A failure here means that the strategy now runs without a GPU, and that docs/matrix.md has a row to try.


def test_fsdp_needs_gpu() -> None:
    with pytest.raises(ValueError, match="requires a GPU"):
        quiet_trainer(strategy=FSDPStrategy())


# The trainings: ``python -m tests.lightning.test_sharded SERVER_URL JOB_ID FOLDER [DATA_PARALLEL TENSOR_PARALLEL]``.


class Sharded(Classifier):
    """Module with weights sharded over the data-parallel processes, or a layer split over the others."""

    def configure_model(self) -> None:
        meshes = self.device_mesh
        assert meshes is not None
        if meshes["data_parallel"].size() > 1:
            fully_shard(self.network, mesh=meshes["data_parallel"])
        else:
            cut = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.network, meshes["tensor_parallel"], cut)

    def train_dataloader(self) -> Loader:
        return train_loader()


def train_sharded(server_url: str, job_id: str, folder: str, data_parallel: str, tensor_parallel: str) -> None:
    """Train one epoch as one of two ranks, which write down their batches."""
    torch.set_num_threads(1)
    strategy = ModelParallelStrategy(
        data_parallel_size=int(data_parallel), tensor_parallel_size=int(tensor_parallel), process_group_backend="gloo"
    )
    bench = Bench(argparse.Namespace(url=server_url), job_id, Path(folder))
    trainer = quiet_trainer(bench.callback(), strategy=strategy, devices=2)
    module = Sharded()
    trainer.fit(module)
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(module.seen_sizes))
    leave()


class WriteDown(Callback):
    """Write the observations of a spawned process to a file, because its memory is lost."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen = {"sizes": pl_module.seen_sizes, "steps": trainer.global_step}
        Path(self._folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def train_spawned(server_url: str, job_id: str, folder: str) -> None:
    torch.set_num_threads(1)
    bench = Bench(argparse.Namespace(url=server_url), job_id, Path(folder))
    callback = bench.BatchSize(bench.job(0.5, higher_is_better_metric=True), "score", server_url=server_url)
    trainer = quiet_trainer(callback, WriteDown(folder), devices=2, strategy="ddp_spawn")
    trainer.fit(Classifier(0.5), HardCodedData())
    try:
        trial = str(callback.trial)
    except ZeusBSOError as error:
        trial = str(error)
    Path(folder, "parent.json").write_text(json.dumps(trial))


if __name__ == "__main__":
    train = train_sharded if len(sys.argv) > 4 else train_spawned
    train(*sys.argv[1:])
