"""A Lightning training with a model spread over two processes; each writes down its batches.

Usage: ``python -m tests.support.lightning_sharded SERVER_URL JOB_ID FOLDER DATA_PARALLEL TENSOR_PARALLEL``, as a rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.job_bench import NEXT_SIZE, SERVERS_SIZE, seconds_and_joules
from tests.support.lightning_bench import Classifier, Loader, quiet_trainer, train_loader
from tests.support.process_end import leave
from zeus_plugins import JobSpec
from zeus_plugins.lightning import ZeusBSOCallback


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


def main(server_url: str, job_id: str, folder: str, data_parallel: str, tensor_parallel: str) -> None:
    """Train one epoch."""
    torch.set_num_threads(1)
    strategy = ModelParallelStrategy(
        data_parallel_size=int(data_parallel), tensor_parallel_size=int(tensor_parallel), process_group_backend="gloo"
    )
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(NEXT_SIZE, SERVERS_SIZE),
        default_batch_size=SERVERS_SIZE,
        target_metric=0.0,
        max_epochs=1,
    )
    callback = ZeusBSOCallback(job, "score", server_url=server_url, energy_monitor=seconds_and_joules(1.0, 10.0))
    trainer = quiet_trainer(callback, strategy=strategy, devices=2)
    module = Sharded()
    trainer.fit(module)
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(module.seen_sizes))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
