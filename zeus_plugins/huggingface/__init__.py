"""Batch size, power limit and energy for the Hugging Face Trainer.

Example:
    The whole change to a training script::

        from zeus_plugins import JobSpec
        from zeus_plugins.huggingface import ZeusBSOTrainerCallback

        job = JobSpec(
            job_id="sentiment-nightly", job_id_prefix="sentiment", batch_sizes=[16, 32, 64, 128],
            default_batch_size=64, target_metric=0.84, max_epochs=10,
        )
        Trainer(model, args, …, callbacks=[ZeusBSOTrainerCallback(job, monitor="accuracy")]).train()
"""

from zeus_plugins.huggingface.batch_size import ZeusBSOTrainerCallback
from zeus_plugins.huggingface.energy import ZeusEnergyTrainerCallback
from zeus_plugins.huggingface.power_limit import ZeusPowerLimitTrainerCallback

__all__ = [
    "BatchSizeCallback",
    "EnergyCallback",
    "PowerLimitCallback",
    "ZeusBSOTrainerCallback",
    "ZeusEnergyTrainerCallback",
    "ZeusPowerLimitTrainerCallback",
]

# Second names, which `zeus_plugins.lightning` has too.
BatchSizeCallback = ZeusBSOTrainerCallback
EnergyCallback = ZeusEnergyTrainerCallback
PowerLimitCallback = ZeusPowerLimitTrainerCallback
