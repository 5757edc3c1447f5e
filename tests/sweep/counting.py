"""Samples of each optimizer step, counted by hooks on the network and optimizers that are unknown to the product."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class StepSizes:
    """Count, per epoch, the samples that pass the network between two steps of its optimizer.

    Args:
        network: Module that every sample of a batch passes once.
    """

    def __init__(self, network: nn.Module) -> None:
        self.epochs: list[list[int]] = []
        self._samples = 0
        network.register_forward_pre_hook(self._count)

    def begin_epoch(self) -> None:
        self.epochs.append([])

    def watch(self, optimizers: Iterable[Any]) -> None:
        for optimizer in optimizers:
            getattr(optimizer, "optimizer", optimizer).register_step_post_hook(self._close_step)

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            self._samples += len(args[0])

    def _close_step(self, *_: Any) -> None:
        self.epochs[-1].append(self._samples)
        self._samples = 0
