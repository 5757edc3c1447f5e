"""The way in which a callback takes charge of a Trainer's `train`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.huggingface._trainer import (
    trainer_under_construction,
)

T = TypeVar("T")


class TrainWrapper(TrainerCallback):
    """A callback that wraps `Trainer.train`: no hook is called when a training ends by an error."""

    # The attribute of a wrapped `train` that holds the callback; a trainer has one callback of each kind.
    _OWNER: ClassVar[str]

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
            return self._train(trainer, train, args, kwargs)

        vars(wrapped)[self._OWNER] = self
        vars(trainer)["train"] = wrapped

    # No argument of a hook is the trainer, and later hooks come after it has made its loader and its steps' count.
    # The server is not asked here: a trainer may be made for its evaluation alone.
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take charge of the trainer whose constructor calls this."""
        trainer = trainer_under_construction(args)
        if trainer is not None:
            self.attach(trainer)

    def _train(self, trainer: Trainer, train: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """The work of `trainer.train` while the callback is attached."""
        raise NotImplementedError
