"""Recognition of models that an earlier trial of this process has trained.

A training that goes on from such weights reaches the target sooner than a whole one, at any batch size, so that it must
not be a trial of the same job.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

# Per model, the ids of the jobs that have trained it, with the sum of its weights after the latest trial of each.
_TRAINED: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()


class TrainedWeights:
    """Weights of a model at the start of a training, compared with those at earlier ends and at its own end.

    Without a model, nothing is known or noted.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sum = None if model is None else sum_of_weights(model)

    def are_of(self, job_id: str) -> bool:
        """Return True if a trial of this job has left the model in this state."""
        return self._sum is not None and _TRAINED.get(self._model, {}).get(job_id) == self._sum

    def end(self, job_id: str) -> None:
        """Note that a trial of this job leaves the model as it is now; do nothing if its weights are the same."""
        now = None if self._sum is None else sum_of_weights(self._model)
        if now is not None and now != self._sum:
            _TRAINED.setdefault(self._model, {})[job_id] = now


def sum_of_weights(model: Any) -> float | None:
    """Return the sum of this process's parameters, or of its shards of them; None if it holds none."""
    parts = [getattr(each, "_local_tensor", each) for each in model.parameters()]
    held = [each.detach() for each in parts if each.numel() > 0]
    # The argument makes no copy of a parameter in double precision, as a conversion would.
    return sum(float(each.sum(dtype=sys.modules["torch"].float64)) for each in held) if held else None
