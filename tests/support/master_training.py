"""A tiny training script for a master: softmax regression on scikit-learn's digits, in numpy.

The file ``--ends`` determines how each run ends: a word per run (the last word for all later runs), selected by the
seed, so that a relaunched run ends in the same way.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

FIRST_SEED = 123456
MAX_POWER_W = 100.0


def note_that_it_has_begun(log_dir: Path, line: str) -> None:
    with (log_dir.parent / "begun.txt").open("a") as file:
        file.write(f"{line}\n")


def way_to_end(ends: Path | None, number: int) -> str:
    if ends is None or not ends.exists():
        return "train"
    lines = ends.read_text().split()
    return lines[min(number, len(lines) - 1)]


def wait_for(path: Path) -> None:
    """Wait until a test creates this file."""
    path.with_suffix(".waits").write_text(str(os.getpid()))
    while not path.exists():
        time.sleep(0.02)


def train(batch_size: int, learning_rate: float, seed: int, epochs: int, target: float) -> tuple[int, float]:
    """Return the number of trained epochs and the last accuracy."""
    import numpy as np

    rng = np.random.default_rng(seed)
    # Read the file of load_digits directly; importing scikit-learn takes longer than the training.
    sklearn = find_spec("sklearn")
    assert sklearn is not None
    assert sklearn.origin is not None
    digits = np.loadtxt(Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images, labels = digits[:, :-1] / 16, digits[:, -1].astype(int)
    train_x, train_y, val_x, val_y = images[:1400], labels[:1400], images[1400:], labels[1400:]
    weights = np.zeros((64, 10))
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        order = rng.permutation(len(train_x))
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            logits = train_x[batch] @ weights
            odds = np.exp(logits - logits.max(axis=1, keepdims=True))
            odds /= odds.sum(axis=1, keepdims=True)
            odds[np.arange(len(batch)), train_y[batch]] -= 1
            weights -= learning_rate * train_x[batch].T @ odds / len(batch)
        accuracy = float(((val_x @ weights).argmax(axis=1) == val_y).mean())
        print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
        if accuracy >= target:
            return epoch, accuracy
    return epochs, accuracy


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--ends", type=Path)
    options = parser.parse_args()

    from zeus_plugins.train_result import TrainResult, result_path

    log_dir, job_id = Path(os.environ["ZEUS_LOG_DIR"]), os.environ["ZEUS_JOB_ID"]
    note_that_it_has_begun(log_dir, f"{job_id} {options.batch_size} {options.lr:g} {options.seed}")
    path = result_path(log_dir, job_id, options.batch_size)
    end = way_to_end(options.ends, options.seed - FIRST_SEED)
    match end:
        case "crash":
            raise RuntimeError("the data are gone")
        case "memory":
            raise MemoryError
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stubborn":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            wait_for(log_dir.parent / "go")
        case "wait":
            wait_for(log_dir.parent / "go")
    epochs, accuracy = train(options.batch_size, options.lr, options.seed, options.epochs, options.target)
    # A predictable cost: each size has a fixed price per epoch.
    energy, seconds = 10.0 * epochs + options.batch_size / 64, 0.1 * epochs
    eta = float(os.environ["ZEUS_ETA_KNOB"])
    TrainResult(
        energy=energy,
        time=seconds,
        cost=eta * energy + (1 - eta) * MAX_POWER_W * seconds,
        num_epochs=options.epochs,
        reached=accuracy >= options.target,
        end_epoch=epochs,
        metric=accuracy,
        energy_source="a made-up price",
    ).write(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
