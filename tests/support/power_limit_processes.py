"""A training on two processes that tries power limits; each writes down its observations.

Usage: ``torchrun --nproc_per_node 2 -m tests.support.power_limit_processes FOLDER FRAMEWORK [SERVER_URL]``

With a server, both callbacks are used, and no file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.frameworks import Powered
from tests.support.job_bench import NEVER
from tests.support.process_end import leave

EPOCHS = 4  # of 6 batches for each process
BATCH_SIZE = 32


def train(framework: str, folder: Path, server_url: str | None) -> dict[str, Any]:
    """Train a job with a single size, although no training reaches its target.

    Returns:
        Observations of this process.
    """
    work, is_lightning = Powered(), framework == "lightning"
    module = import_module("tests.support.lightning_bench" if is_lightning else "tests.support.hf_bench")
    bench = module.Bench(argparse.Namespace(url=server_url), "digits-limits", folder)
    power = bench.PowerLimit(**work.options(**({} if server_url else {"profile_path": folder / "profile.json"})))
    others = []
    if server_url:
        sizes = {"batch_sizes": (BATCH_SIZE,), "default_batch_size": BATCH_SIZE}
        job = bench.job(NEVER, **sizes, max_epochs=EPOCHS, num_pruning_rounds=0)
        others = [bench.callback(job, energy_monitor=work.monitor, on_failure="stop")]
    options = {"devices": 2, "strategy": "ddp"} if is_lightning else {}
    bench.training(power, *others, work=work, epochs=EPOCHS, **options).train()
    assert power.profile is not None
    return {
        "chosen_limit_w": power.chosen_limit_w,
        "profile": power.profile.model_dump(mode="json"),
        "set_w": work.device.set_w,
        "limits_of_steps": work.limits_of_steps,
    }


if __name__ == "__main__":
    seen = train(sys.argv[2], Path(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else None)
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    leave()
