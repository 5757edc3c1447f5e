"""Sentiment in texts that change: the optimizer notices the change, and finds the new cheapest batch size.

Each recurrence trains on its own slice of generated texts, in which each word is a number. The first slices have short
posts, for which large batches are cheapest. From slice ``--change`` on, the texts are long reviews, for which large
batches save nothing. Costs are computed from the CPU time of the training, so that other programs hardly change them.
The server runs in this process, on a temporary database file.

Usage: ``python examples/sentiment_drift.py [--recurrences N] [--change N] [--policy POLICY] [--plot FILE]``
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.client import client_from_environment
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.protocol import TrialState, TrialView, cost

SENTIMENT_WORDS = 300  # number of praise words, and also of blame words
OTHER_WORDS = 1000
RATE = 0.003  # learning rate
SIZES = (32, 64, 128, 256, 512, 1024)
DEFAULT = 64
TARGET = 0.84
MAX_EPOCHS = 25
WATTS = 65.0


@dataclass(frozen=True)
class Kind:
    """A kind of texts: words per text, share of words that fit the label (`own`) or contradict it (`other`)."""

    name: str
    words: int
    own: float
    other: float


POSTS = Kind("short posts", 12, 0.30, 0.06)
REVIEWS = Kind("long reviews", 300, 0.095, 0.055)


@dataclass(frozen=True)
class Texts:
    """Texts and their labels; each row of `words` is one text, as word numbers."""

    words: Tensor
    labels: Tensor


def made_up(kind: Kind, count: int, seed: int) -> Texts:
    """Generate `count` texts of a kind; about 2 % have the wrong label."""
    dice = np.random.default_rng(seed)
    labels = dice.integers(0, 2, count)
    which, share = dice.integers(0, SENTIMENT_WORDS, (count, kind.words)), dice.random((count, kind.words))
    own, other = which + SENTIMENT_WORDS * labels[:, None], which + SENTIMENT_WORDS * (1 - labels[:, None])
    neutral = 2 * SENTIMENT_WORDS + dice.integers(0, OTHER_WORDS, (count, kind.words))
    words = np.where(share < kind.own, own, np.where(share < kind.own + kind.other, other, neutral))
    told = np.where(dice.random(count) < 0.02, 1 - labels, labels)
    return Texts(torch.tensor(words), torch.tensor(told))


def epochs(batch_size: int, kind: Kind, number: int) -> Iterator[float]:
    """Train on slice `number`; yield the validation accuracy after each epoch, without end."""
    train, validation = made_up(kind, 4000, seed=2 * number), made_up(kind, 1000, seed=2 * number + 1)
    torch.manual_seed(number)
    vocabulary = 2 * SENTIMENT_WORDS + OTHER_WORDS
    network = nn.Sequential(nn.EmbeddingBag(vocabulary, 64, mode="mean"), nn.Linear(64, 2))
    adam = torch.optim.Adam(network.parameters(), lr=RATE)
    while True:
        order = torch.randperm(len(train.labels))
        for rows in order[: len(order) // batch_size * batch_size].split(batch_size):
            adam.zero_grad()
            nn.functional.cross_entropy(network(train.words[rows]), train.labels[rows]).backward()
            adam.step()
        with torch.no_grad():
            said = network(validation.words).argmax(dim=1)
        yield (said == validation.labels).float().mean().item()


def train(job: JobSpec, server_url: str, kind: Kind, number: int) -> tuple[int, bool]:
    """Train once, as one recurrence of the job; return the batch size, and True if the target was reached."""
    monitor = EstimateMonitor(WATTS, clock=time.process_time)
    with BatchSizeOptimizer(monitor, server_url, job) as optimizer:
        batch_size = optimizer.get_batch_size()
        accuracies = epochs(batch_size, kind, number)
        optimizer.on_train_begin()
        try:
            while not optimizer.training_finished:
                optimizer.on_evaluate(next(accuracies))
        except ZeusBSOTrainFailError:
            return batch_size, False
    return batch_size, True


def mean_cost_j(job: JobSpec, batch_size: int, kind: Kind) -> float:
    """Return the mean cost in joules of two trainings at a fixed size; infinite if one misses the target."""
    monitor, costs = EstimateMonitor(WATTS, clock=time.process_time), []
    for number in (1001, 1002):
        monitor.begin_window("training")
        reached = any(accuracy >= TARGET for accuracy in islice(epochs(batch_size, kind, number), MAX_EPOCHS))
        spent = monitor.end_window("training")
        cost_j = cost(energy_j=spent.energy_j, time_s=spent.time_s, max_power_w=WATTS, eta=job.eta_knob)
        costs.append(cost_j if reached else math.inf)
    return sum(costs) / len(costs)


def main() -> None:
    """Run all recurrences of the job, print each run, and plot the costs if ``--plot`` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=40, metavar="N", help="training count (default %(default)s)")
    parser.add_argument("--change", type=int, default=16, metavar="N", help="first training on long reviews")
    parser.add_argument("--policy", default="gp_voi", help="rules that choose batch sizes (default %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the costs of runs, default and best size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    next(epochs(DEFAULT, POSTS, 0))  # Keep PyTorch's one-time loading out of the costs.
    job = JobSpec(
        job_id="sentiment-drift",
        job_id_prefix="sentiment",
        batch_sizes=SIZES,
        default_batch_size=DEFAULT,
        target_metric=TARGET,
        max_epochs=MAX_EPOCHS,
        policy=options.policy,
    )
    with tempfile.TemporaryDirectory() as folder:
        server_url = f"embedded://{folder}/bso.sqlite3"
        for number in range(1, options.recurrences + 1):
            kind = REVIEWS if number >= options.change else POSTS
            batch_size, reached = train(job, server_url, kind, number)
            print(f"slice {number}, {kind.name}: {batch_size}{'' if reached else ', target missed'}", flush=True)
        with client_from_environment(server_url) as client:
            trials = client.show_job(job.job_id).trials
    for trial in trials:
        print(f"{trial.trial_number:3} {trial.batch_size:5} {trial.cost_j:8.2f} J  {trial.reason}")
    if options.plot:
        plot(job, trials, options.change, options.plot)


def plot(job: JobSpec, trials: Sequence[TrialView], change: int, file: Path) -> None:
    """Plot the cost of each run, and the mean costs of the default and the cheapest size on the same texts."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for kind, first, last in ((POSTS, 1, change - 1), (REVIEWS, change, len(trials))):
        costs = {size: mean_cost_j(job, size, kind) for size in SIZES}
        best = min(costs, key=lambda size: costs[size])
        for size, word, colour, above in (
            (DEFAULT, "the default", "grey", 3),
            (best, "the cheapest", "tab:green", -11),
        ):
            axes.hlines(costs[size], first - 0.5, last + 0.5, colors=colour, linestyles="dashed")
            place = (first - 0.3, costs[size])
            axes.annotate(f"{word}, {size}", place, (0, above), textcoords="offset points", color=colour)
    for trial in trials:
        reached = trial.state is TrialState.COMPLETED
        axes.scatter(
            trial.trial_number, trial.cost_j, c="tab:blue" if reached else "tab:red", marker="o" if reached else "X"
        )
        place = (trial.trial_number, trial.cost_j)
        axes.annotate(
            f"{trial.batch_size}", place, (0, 6), textcoords="offset points", ha="center", fontsize=7, rotation=60
        )
    axes.axvline(change - 0.5, color="black", linewidth=0.8)
    axes.set(xlabel=f"run; from {change} on, texts are long reviews", ylabel="cost of the run (J)", yscale="log")
    axes.set_yticks(ticks := [3, 5, 10, 20, 30, 50, 100], [str(tick) for tick in ticks])
    axes.minorticks_off()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
