"""A recurring job of a plain PyTorch loop, as the tests and the processes that they start know it."""

from __future__ import annotations

from zeus_plugins import JobSpec
from zeus_plugins.protocol import ZEUS, GpuConfig

GPUS = GpuConfig(max_power=100, number_of_gpus=1, gpu_model="V100")
JOB = JobSpec(
    job_id_prefix="loop",
    job_id="loop",
    batch_sizes=(8, 16, 32, 64),
    default_batch_size=32,
    target_metric=0.9,
    max_epochs=4,
    num_pruning_rounds=1,
    mab_num_explorations=1,
    mab_seed=7,
    policy=ZEUS,
)
