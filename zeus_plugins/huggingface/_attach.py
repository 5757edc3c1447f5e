"""The way in which a callback takes charge of a Trainer's `train`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.huggingface._trainer import trainer_under_construction

T = TypeVar("T")


class TrainWrapper(TrainerCallback):
    """A callback that wraps `Trainer.train`: no hook is called when a training ends by an error."""

    # The attribute of a wrapped `train` that holds the callback; a trainer has one callback of each kind.
    _OWNER: ClassVar[str]

    # The trainer whose `train` runs.
    _trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Take charge of a trainer that was made without this callback; nothing the second time.

        Args:
            trainer: The callback becomes one of its callbacks, if it is none yet.

        Raises:
            ZeusBSOConfigError: Another callback of this kind has charge of it.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        owner = getattr(trainer.train, self._OWNER, None)
        if owner is self:
            return
        if owner is not None and owner in trainer.callback_handler.callbacks:
            raise ZeusBSOConfigError(f"the trainer has two {type(self).__name__}: keep one")
        train = trainer.train

        @functools.wraps(train)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self not in trainer.callback_handler.callbacks:  # somebody has removed it
                return train(*args, **kwargs)
            if self._trainer is not None:
                raise ZeusBSOOperationOrderError(
                    "the callback is in a training already: make a callback for each Trainer that trains at the same "
                    "time"
                )
            self._trainer = trainer
            try:
                return self._train(trainer, train, args, kwargs)
            finally:
                self._trainer = None

        vars(wrapped)[self._OWNER] = self
        vars(trainer)["train"] = wrapped

    # No argument of a hook is the trainer, and later hooks come after it has made its loader and its steps' count.
    # The server is not asked here: a trainer may be made for its evaluation alone.
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take charge of the trainer whose constructor calls this."""
        trainer = trainer_under_construction(state)
        if trainer is not None:
            self.attach(trainer)

    def _train(self, trainer: Trainer, train: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """The work of `trainer.train` while the callback is attached."""
        raise NotImplementedError

    def _trainer_of(self, state: TrainerState) -> Trainer:
        """The trainer whose training begins with this state.

        Raises:
            ZeusBSOOperationOrderError: It is one that the callback has not taken charge of.
        """
        if self._trainer is None or self._trainer.state is not state:
            raise not_attached()
        return self._trainer


def not_attached() -> ZeusBSOOperationOrderError:
    """The error of a callback that a trainer calls without being in its charge."""
    return ZeusBSOOperationOrderError(
        "the callback came to this Trainer after its construction: call callback.attach(trainer) before "
        "trainer.train(), or give it to Trainer(callbacks=[…])"
    )
