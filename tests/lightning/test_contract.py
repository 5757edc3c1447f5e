"""Private properties of Lightning that `zeus_plugins/lightning/_trainer.py` uses and no other test exercises.

The other tests train with the rest of these properties, and fail with them. All hold with Lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.support.lightning_bench import QUIET, Classifier, digits, quiet_trainer
from zeus_plugins.lightning._trainer import LightningPort
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.patches import Patches

pytestmark = QUIET


def test_strategies_state_whether_checkpoints_load_late() -> None:
    assert quiet_trainer().strategy.restore_checkpoint_after_setup is False
    assert FSDPStrategy().restore_checkpoint_after_setup


def made_anew(module: LightningModule) -> Any:
    """Return the module's resized loader as Lightning makes it again for each of several devices."""
    made: list[Any] = []

    class Resize(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
            LightningPort(trainer, pl_module).deliver(BatchSplit(24, 1), Patches())

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
            loader = _request_dataloader(trainer.fit_loop._data_source)
            made.append(_update_dataloader(loader, SequentialSampler(loader.dataset)))

    quiet_trainer(Resize(), max_steps=1, limit_val_batches=0).fit(module)
    (anew,) = made
    return anew


class Halves(BatchSampler):
    """A batch sampler with a default for the argument of its size."""

    def __init__(self, sampler: Any, batch_size: int = 16, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)


@pytest.mark.parametrize("is_sampler", [False, True], ids=["loader", "batch sampler"])
@pytest.mark.parametrize(
    ("arguments", "keywords"), [((16,), {}), ((), {"batch_size": 16}), ((), {})], ids=["position", "keyword", "default"]
)
def test_lightning_makes_loader_again_from_saved_arguments(
    arguments: tuple[int, ...], keywords: dict[str, int], *, is_sampler: bool
) -> None:
    class Module(Classifier):
        """Makes its loader in the method where Lightning records the arguments."""

        def train_dataloader(self) -> Any:
            data = digits()[0]
            if is_sampler:
                return DataLoader(data, batch_sampler=Halves(SequentialSampler(data), *arguments, **keywords))
            return DataLoader(data, *arguments, **keywords)

    anew = made_anew(Module())
    batcher = anew.batch_sampler if is_sampler else anew
    assert batcher.batch_size == 24
