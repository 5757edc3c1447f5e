"""A training on two processes that tries power limits; each writes down what it saw.

Usage: ``torchrun --nproc_per_node 2 -m tests.power_limit_processes FOLDER FRAMEWORK``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

EPOCHS = 4  # of 6 batches for each process


def train(framework: str, folder: Path) -> dict[str, Any]:
    """Train.

    Returns:
        What this process saw.
    """
    options = {"profile_path": folder / "profile.json"}
    powered: Any
    if framework == "lightning":
        from tests.lightning_models import HardCodedData, quiet_trainer
        from tests.lightning_powered import Powered as LightningPowered

        powered = LightningPowered()
        callback: Any = powered.callback(**options)
        trainer = quiet_trainer(callback, devices=2, strategy="ddp", max_epochs=EPOCHS)
        trainer.fit(powered, HardCodedData())
    else:
        from tests.hf_powered import Powered as TrainerPowered

        powered = TrainerPowered()
        callback = powered.callback(**options)
        powered.trainer(folder, callback, num_train_epochs=EPOCHS).train()
    assert callback.profile is not None
    return {
        "chosen_limit_w": callback.chosen_limit_w,
        "profile": callback.profile.model_dump(mode="json"),
        "set_w": powered.device_.set_w,
        "limits_of_steps": powered.limits_of_steps,
    }


if __name__ == "__main__":
    seen = train(sys.argv[2], Path(sys.argv[1]))
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
