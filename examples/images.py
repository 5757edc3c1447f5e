"""The images of the examples, as rows of pixels from 0 to 1: digits from scikit-learn, or MNIST from torchvision."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

TARGETS = {"digits": 0.93, "mnist": 0.97}
"""Accuracy that a network with one hidden layer reaches within a few epochs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments ``--data`` and ``--data-folder``."""
    parser.add_argument("--data", choices=TARGETS, default="digits", help="data set of images (default %(default)s)")
    parser.add_argument("--data-folder", type=Path, default=Path("data"), help="folder of MNIST (default ./data)")


def load(options: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the validation set; torchvision downloads MNIST at the first use."""
    return mnist(options.data_folder) if options.data == "mnist" else digits()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 images of 8 × 8 pixels, split into 80 % for training and 20 % for validation."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = (TensorDataset(pixels[rows], torch.tensor(labels)[rows]) for rows in order.split(1438))
    return train, validation


def mnist(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return 60,000 images of 28 × 28 pixels for training, and 10,000 for validation."""
    try:
        from torchvision.datasets import MNIST
    except ModuleNotFoundError:
        raise SystemExit("torchvision is not installed: pip install torchvision, or leave out --data mnist") from None
    parts = (MNIST(folder, train=is_train, download=True) for is_train in (True, False))
    train, validation = (TensorDataset(part.data.flatten(1).float() / 255, part.targets) for part in parts)
    return train, validation
