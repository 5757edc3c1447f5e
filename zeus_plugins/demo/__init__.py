"""The demo of ``zeus-plugins demo``: a recurring training that finds its batch size on this machine.

The job is not defined beside its training in `digits`, because importing that module loads PyTorch and Lightning.
"""

from __future__ import annotations

from zeus_plugins.protocol import JobSpec

# The default is too large for this small training, as one copied from the paper of a large one.
JOB = JobSpec(
    job_id_prefix="digits",
    job_id="digits",
    batch_sizes=(16, 64, 256, 512),
    default_batch_size=512,
    target_metric=0.95,
    max_epochs=60,
    num_pruning_rounds=1,
    mab_num_explorations=2,
    mab_seed=1,
    controls=0.2,  # above the default, so that 20 runs show a verdict on a default that costs three times the best
)
