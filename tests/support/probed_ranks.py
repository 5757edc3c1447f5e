"""One of two processes that train with and without a probe."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.process_end import leave
from tests.support.rank_training import rank_here
from tests.support.trapped import favour_large_batches, generous, predicting

MORE = {
    "lightning": {"devices": 2, "strategy": "ddp"},
    "huggingface": {"ddp_backend": "gloo"},
}


JOBS: dict[str, dict[str, Any]] = {
    "direct": {"default_batch_size": 64},
    "predicted": {"default_batch_size": 32, "first_run": "predicted"},
}


def main(framework: str, folder: str) -> None:
    """Train in each way, and write the observations of this process to a file."""
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for way in ("off", "auto", "memory", "direct", "predicted"):
        patch = pytest.MonkeyPatch()
        if way == "predicted":
            favour_large_batches(patch)
        with generous(patch) as sent:
            seen[way] = trained(framework, Path(folder, way), way) | {
                "sizes": [[each.batch_size for each in found.sizes] for found in sent],
                "out_of_memory": [found.out_of_memory for found in sent],
                "has_scale": [found.critical_batch_size is not None for found in sent],
            }
    Path(folder, f"{rank_here()}.json").write_text(json.dumps(seen))
    leave()


def trained(framework: str, folder: Path, way: str) -> dict[str, Any]:
    """Train, on the second process without memory for batches of 32 if the way requires this."""
    folder.mkdir(exist_ok=True)
    probe, limit = ("off" if way == "off" else "auto"), (32 if way == "memory" and rank_here() == 1 else None)
    said = {"job": predicting(**JOBS[way]), "lr_scaling": "none"} if way in JOBS else None
    kind: Any = import_module(f"tests.support.trapped_{framework}").Ran
    if framework == "lightning":
        run = kind(folder, probe, has_batch_norm=False)
        run.said = said or run.said
        model = run.module.model
        model.limit = limit
        trainer = run.train(**MORE[framework])
        steps = trainer.global_step
    else:
        run = kind(folder, probe, has_batch_norm=False, said=said, **MORE[framework])
        model = run.model
        model.limit = limit
        run.trainer.train()
        steps = run.trainer.state.global_step
    weights = [each.tolist() for each in model.state_dict().values()]
    return {"losses": model.losses, "trained": model.sizes, "weights": weights, "steps": steps}


if __name__ == "__main__":
    main(*sys.argv[1:])
