"""Trainings on two processes, one after another; each process writes down its observations.

Usage: ``python -m tests.support.rank_training BENCH SERVER_URL FOLDER WAY…``, as a rank of two, with ``BENCH`` the
module of a framework's bench.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import AT_ONCE, NEVER, NEXT_SIZE, seconds_and_joules
from tests.support.process_end import leave
from zeus_plugins.errors import ZeusBSOError

BATCH_SIZE = 48
WORLD_SIZE = 2
NOWHERE = "http://127.0.0.1:9"  # the port of an obsolete service, where no server listens
# Lightning's metric is local to each rank until the callback averages; the Trainer's metric covers all data.
SCORES = {"lightning_bench": (0.25, 0.75), "hf_bench": (0.5, 0.5)}
MEAN_SCORE = 0.5
TARGETS = {
    "plain": MEAN_SCORE,
    "guessed": MEAN_SCORE,
    **dict.fromkeys(("never", "memory", "preempted", "finish"), NEVER),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "lightning_bench": {"devices": WORLD_SIZE, "strategy": "ddp"},
    "hf_bench": {"ddp_backend": "gloo"},
}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def job_id_of(way: str) -> str:
    return f"digits-{way.replace(' ', '-')}"


def batch_size_of(way: str) -> int:
    """Return the batch size; an odd share shows that the trainer's batch is global, as accelerate splits evenly."""
    return 42 if "split" in way else BATCH_SIZE


def rank_here() -> int:
    # Lightning sets no rank for its script's own process
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def train(name: str, server_url: str, folder: Path, way: str) -> dict[str, Any]:
    """Train at most two epochs, or one in ways of a single framework.

    Returns:
        Observations of this process.
    """
    kind = import_module(f"tests.support.{name}").Bench
    url = NOWHERE if way == "without server" else server_url
    bench: FrameworkBench = kind(argparse.Namespace(url=url), job_id_of(way), folder / "checkpoints" / way)
    own = import_module("tests.support.hf_bench").WAYS.get(way) if name == "hf_bench" else None
    epochs = 2 if own is None else 1
    target = TARGETS.get(way, AT_ONCE)
    size = batch_size_of(way)
    sizes_of_job = (NEXT_SIZE, size) if way == "finish" else (size,)
    job = bench.job(target, batch_sizes=sizes_of_job, default_batch_size=size, max_epochs=epochs)
    options = {"scores": (SCORES[name][rank_here()],), "epochs": epochs, **OPTIONS[name], **(own or {})}
    said: dict[str, Any] = {"server_url": url}
    asked = {"target": target, "job_id": bench.job_id} if way == "guessed" else {"job": job}
    if way == "beyond":
        said["after_target"] = "continue"
    if way == "finish":
        said |= {"on_failure": "finish", "energy_monitor": seconds_and_joules(1.0, 10.0)}
        if rank_here() == 0:
            bench.complete_first_trial(job)
    sizes: list[int] = []
    checkpoint = None
    if way == "preempted":
        first = bench.training(bench.callback(job), work=Work({5: SystemExit(143)}), save_every=0, **options)
        with suppress(SystemExit):
            first.train()
        sizes, checkpoint = first.sizes, bench.checkpoint(4)
        if rank_here() > 0:  # only the first rank may contact the server
            said["server_url"] = NOWHERE
    callback, meter = bench.BatchSize(**asked, monitor="score", **said), bench.Energy()
    work = Work({2: OUT_OF_MEMORY} if way == "memory" and rank_here() == 1 else None)
    training = bench.training(callback, meter, work=work, **options)
    seen: dict[str, Any] = {}
    try:
        training.train(checkpoint)
    except ZeusBSOError as error:
        seen |= {"error": type(error).__name__, "message": str(error)}
    else:
        seen |= {"converged": callback.trial.verdict.converged, "trial_number": callback.trial.trial_number}
    return seen | {
        "score": SCORES[name][rank_here()],
        "time_s": meter.time_s,
        "energy_rows": len(training.logged("zeus/time_s")),
        "sizes": sizes + training.sizes,
        "steps": training.steps if training.sizes else None,
    }


def main(name: str, server_url: str, folder: str, *ways: str) -> None:
    """Train each way, and write the observations to a file per process and way."""
    torch.set_num_threads(1)
    for way in ways:
        seen = train(name, server_url, Path(folder), way)
        Path(folder, f"{way} {rank_here()}.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
