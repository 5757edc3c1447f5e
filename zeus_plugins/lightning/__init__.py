"""Batch size, power limit and energy for PyTorch Lightning.

Example:
    The whole change to a training script::

        from zeus_plugins import JobSpec
        from zeus_plugins.lightning import ZeusBSOCallback

        job = JobSpec(
            job_id="digits-nightly", job_id_prefix="digits", batch_sizes=[16, 32, 64, 128], default_batch_size=64,
            target_metric=0.95, max_epochs=30,
        )
        Trainer(max_epochs=30, callbacks=[ZeusBSOCallback(job, monitor="val_acc")]).fit(model, datamodule)
"""

from zeus_plugins.lightning.batch_size import ZeusBSOCallback
from zeus_plugins.lightning.energy import ZeusEnergyCallback
from zeus_plugins.lightning.power_limit import ZeusPowerLimitCallback

__all__ = [
    "BatchSizeCallback",
    "EnergyCallback",
    "PowerLimitCallback",
    "ZeusBSOCallback",
    "ZeusEnergyCallback",
    "ZeusPowerLimitCallback",
]

# Second names, which `zeus_plugins.huggingface` has too.
BatchSizeCallback = ZeusBSOCallback
EnergyCallback = ZeusEnergyCallback
PowerLimitCallback = ZeusPowerLimitCallback
