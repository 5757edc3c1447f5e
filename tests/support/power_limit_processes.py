"""A training on two processes that tries power limits; each writes down what it saw.

Usage: ``torchrun --nproc_per_node 2 -m tests.support.power_limit_processes FOLDER FRAMEWORK [SERVER_URL]``

With a server both callbacks are there, and no file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.process_end import leave
from zeus_plugins import JobSpec

EPOCHS = 4  # of 6 batches for each process
BATCH_SIZE = 32


def job() -> JobSpec:
    """One of a single size, which does not mind that no training reaches its target."""
    return JobSpec(
        job_id="limits-nightly",
        job_id_prefix="limits",
        batch_sizes=(BATCH_SIZE,),
        default_batch_size=BATCH_SIZE,
        target_metric=2.0,
        max_epochs=EPOCHS,
        num_pruning_rounds=0,
    )


def train(framework: str, folder: Path, server_url: str | None) -> dict[str, Any]:
    """Train.

    Returns:
        What this process saw.
    """
    options = {} if server_url else {"profile_path": folder / "profile.json"}
    others: list[Any] = []
    powered: Any
    if framework == "lightning":
        from tests.support.lightning_models import HardCodedData, quiet_trainer
        from tests.support.lightning_powered import Powered as LightningPowered
        from zeus_plugins.lightning import ZeusBSOCallback

        powered = LightningPowered()
        callback: Any = powered.callback(**options)
        if server_url:
            monitor = powered.machine.monitor
            others = [ZeusBSOCallback(job(), "score", server_url=server_url, energy_monitor=monitor, on_failure="stop")]
        trainer = quiet_trainer(callback, *others, devices=2, strategy="ddp", max_epochs=EPOCHS)
        trainer.fit(powered, HardCodedData())
    else:
        from tests.support.hf_powered import Powered as TrainerPowered
        from zeus_plugins.huggingface import ZeusBSOTrainerCallback

        powered = TrainerPowered()
        callback = powered.callback(**options)
        if server_url:
            monitor = powered.machine.monitor
            others = [
                ZeusBSOTrainerCallback(job(), "score", server_url=server_url, energy_monitor=monitor, on_failure="stop")
            ]
        powered.trainer(folder, callback, *others, num_train_epochs=EPOCHS).train()
    assert callback.profile is not None
    return {
        "chosen_limit_w": callback.chosen_limit_w,
        "profile": callback.profile.model_dump(mode="json"),
        "set_w": powered.device_.set_w,
        "limits_of_steps": powered.limits_of_steps,
    }


if __name__ == "__main__":
    seen = train(sys.argv[2], Path(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else None)
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    leave()
