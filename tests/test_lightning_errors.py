"""How real fits end their trials when something goes wrong."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support.job_bench import (
    NEXT_SIZE,
    SERVERS_SIZE,
)
from tests.support.lightning_bench import (
    QUIET,
    Bench,
    Interrupt,
    make_bench,  # noqa: F401 - a fixture
    make_mortal_bench,  # noqa: F401 - a fixture
)
from tests.support.lightning_models import USERS_SIZE, Classifier, quiet_trainer, train_loader
from tests.support.servers import Server, free_port
from zeus_plugins.errors import ZeusBSOServerUnreachableError
from zeus_plugins.protocol import TrialState

pytestmark = QUIET


class Failing(Classifier):
    """Raises in its second training step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def training_step(self, batch: Any) -> torch.Tensor:
        if len(self.seen_sizes) == 1:
            raise self._error
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError("the user's own"), TrialState.FAILED),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), TrialState.INFEASIBLE),
        (SIGTERMException(), TrialState.SUSPENDED),
        (SystemExit(3), TrialState.SUSPENDED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_users_error_is_raised_and_ends_the_trial(bench: Bench, error: BaseException, state: TrialState) -> None:
    callback = bench.callback()
    with pytest.raises(type(error)) as raised:
        quiet_trainer(callback).fit(Failing(error), train_loader())
    assert raised.value is error
    trial = bench.only_trial()
    assert trial.state is state
    assert str(error) in (trial.message or "")
    assert type(error).__name__ in (trial.message or "")
    # What was spent until then is known to a checkpoint that is written by a later callback.
    assert (callback.trial.time_s, callback.trial.verdict) == (1.0, None)


def test_a_size_that_ran_out_of_memory_is_not_tried_again(bench: Bench) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        quiet_trainer(bench.callback()).fit(Failing(torch.OutOfMemoryError("CUDA out of memory")), train_loader())
    callback = bench.callback()
    quiet_trainer(callback).fit(Classifier(), train_loader())
    assert callback.trial.batch_size == NEXT_SIZE


def test_a_dead_server_does_not_hide_the_users_error(mortal_bench: Bench) -> None:
    error = RuntimeError("the user's own")
    trainer = quiet_trainer(mortal_bench.callback(), Interrupt(error, before=mortal_bench.server.kill))
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Classifier(), train_loader())
    assert raised.value is error


@pytest.fixture
def _sigint_afterwards() -> Iterator[None]:
    """Lightning turns Ctrl-C off while it shuts down, and leaves it off."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("_sigint_afterwards")
def test_ctrl_c_suspends_the_trial(bench: Bench) -> None:
    trainer = quiet_trainer(bench.callback(), Interrupt(KeyboardInterrupt()))
    with pytest.raises(SystemExit) as leaving:
        trainer.fit(Classifier(), train_loader())
    assert leaving.value.code == 1
    assert bench.only_trial().state is TrialState.SUSPENDED


def test_an_unreachable_server_is_one_clear_error_where_that_is_wanted(bench: Bench) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    module = Classifier()
    loader = train_loader()
    with pytest.raises(ZeusBSOServerUnreachableError, match=url) as raised:
        quiet_trainer(bench.callback(server_url=url, on_unreachable="raise")).fit(module, loader)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert module.seen_sizes == []
    assert loader.batch_size == USERS_SIZE


class Outage(Callback):
    """The server is killed between two epochs, and somebody starts it again."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if trainer.current_epoch == 0:
            self._server.kill()
            self._server.start()


def test_a_server_killed_between_epochs_loses_nothing(mortal_bench: Bench) -> None:
    callback = mortal_bench.callback(mortal_bench.job(0.9, max_epochs=4))
    trainer = quiet_trainer(callback, Outage(mortal_bench.server), max_epochs=4)
    trainer.fit(Classifier(0.1, 0.2, 0.9), train_loader())
    trial = mortal_bench.only_trial()
    assert (trial.state, trial.epochs, trial.batch_size) == (TrialState.COMPLETED, 3, SERVERS_SIZE)
    assert (trial.time_s, trial.energy_j) == (3.0, 30.0)
