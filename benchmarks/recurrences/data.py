"""The data of the trainings: bundled with Python or scikit-learn, or generated, so that no download is needed.

Each recurrence gets fresh data, as in production: its seed draws another sample.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

BLOCK = 32
"""Length of one sample of text, in characters or words."""

_TOPICS = 3
_VOCABULARY = 800
_UNKNOWN = 1
_STRETCH = 4 * BLOCK


@dataclass(frozen=True, slots=True)
class Data:
    """Inputs and targets to train on and to validate with; the first dimension of each tensor counts the samples."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    classes: int = 0
    vocabulary: int = 0


def digits(seed: int) -> Data:
    """Return scikit-learn's handwritten digits, shape (n, 1, 8, 8): 1,437 to train on, 360 to validate with."""
    from sklearn.datasets import load_digits  # absent on GPU machines, which train on generated data

    images, labels = load_digits(return_X_y=True)
    pixels = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return _split(torch.from_numpy(pixels), torch.from_numpy(labels), seed, validation=0.2, classes=10)


def friedman(seed: int, *, drifted: bool) -> Data:
    """Return samples of Friedman's function of ten features; a drift quadruples them and doubles the noise."""
    from sklearn.datasets import make_friedman1

    samples, noise = (12_000, 2.0) if drifted else (3_000, 1.0)
    features, values = make_friedman1(samples + 1000, noise=noise, random_state=seed)
    inputs = torch.from_numpy(features.astype(np.float32))
    scaled = torch.from_numpy(((values - 14.4) / 5.0).astype(np.float32))
    return _split(inputs, scaled, seed, validation=1000 / (samples + 1000))


def characters(seed: int, *, blocks: int = 2_000) -> Data:
    """Return blocks of characters of Python's own documentation, shape (n, `BLOCK`); the targets equal the inputs.

    Validation blocks come from stretches of the text that training blocks leave out.
    """
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = {character: place for place, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([letters[character] for character in text])
    rng = np.random.default_rng(seed)
    train = _blocks(codes, blocks, rng, is_train=True)
    validation = _blocks(codes, 300, rng, is_train=False)
    return Data((train, train), (validation, validation), vocabulary=len(letters))


def excerpts(
    seed: int, *, samples: int = 1_200, validation: int = 600, classes: int = _TOPICS, half: int | None = None
) -> Data:
    """Return excerpts of `BLOCK` words of Python's documentation, shape (n, `BLOCK`), and the numbers of their topics.

    Validation excerpts come from stretches of the texts that training excerpts leave out. With a `half`, 0 or 1, all
    excerpts come from this half of the stretches.
    """
    names = sorted(topics, key=lambda name: (-len(topics[name]), name))[:classes]
    texts = [re.findall(r"\w+|[^\w\s]", topics[name].lower()) for name in names]
    counts = Counter(word for text in texts for word in text)
    common = sorted(counts, key=lambda word: (-counts[word], word))[:_VOCABULARY]
    codes = {word: place + 2 for place, word in enumerate(common)}
    coded = [torch.tensor([codes.get(word, _UNKNOWN) for word in text]) for text in texts]
    if half is not None:
        pairs = [text[: len(text) // (2 * _STRETCH) * 2 * _STRETCH].view(-1, 2, _STRETCH) for text in coded]
        coded = [pair[:, half].flatten() for pair in pairs]
    rng = np.random.default_rng(seed)
    train, held_out = (
        (
            torch.cat([_blocks(text, count // classes, rng, is_train=is_train) for text in coded]),
            torch.arange(classes).repeat_interleave(count // classes),
        )
        for is_train, count in ((True, samples), (False, validation))
    )
    return Data(train, held_out, classes=classes, vocabulary=len(codes) + 2)


class Images:
    """Generated images of bytes, shape (n, 3, pixels, pixels): one wave pattern per class, in strong noise.

    The noise is uniform over all byte values, with a standard deviation of 74 levels; `contrast` is the standard
    deviation of the patterns, in levels. `draw` returns other images at each call, made on the device.
    """

    classes = 10

    def __init__(self, seed: int, *, pixels: int, contrast: float, device: str = "cpu") -> None:
        waves = torch.Generator().manual_seed(0)  # a constant seed: all recurrences share the classes
        coarse = torch.randn(self.classes, 3, 8, 8, generator=waves)
        patterns = torch.nn.functional.interpolate(coarse, size=(pixels, pixels), mode="bilinear")
        self._levels = (contrast * patterns).round().to(torch.int16).to(device)
        self._source = torch.Generator(device).manual_seed(seed)

    def draw(self, count: int) -> list[Tensor]:
        """Return `count` new images and their classes."""
        device = self._levels.device
        labels = torch.randint(0, self.classes, (count,), generator=self._source, device=device)
        noise = torch.empty(count, *self._levels.shape[1:], dtype=torch.int16, device=device)
        noise.random_(0, 256, generator=self._source)
        return [(noise + self._levels[labels]).clamp_(0, 255).to(torch.uint8), labels]


@cache
def python_files() -> tuple[tuple[bytes, ...], str]:
    """Return the files of Python's standard library in a fixed order, and a hash of their names and contents."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    kept = [name for name in names if not left_out & set(name.parts)]
    contents = tuple((folder / name).read_bytes() for name in kept)
    told = b"".join(bytes(name) + content for name, content in zip(kept, contents, strict=True))
    return contents, f"{len(kept)} files, SHA-256 {hashlib.sha256(told).hexdigest()[:16]}"


class Bytes:
    """Blocks of `length` bytes of Python's own files, for a language model.

    Each tenth file is used to validate. Of the others, another 80 % are used with each seed to train.
    """

    def __init__(self, seed: int, length: int) -> None:
        self._rng, self._length = np.random.default_rng(seed), length
        files, _ = python_files()
        others = [file for place, file in enumerate(files) if place % 10 != 9]
        chosen = self._rng.choice(len(others), round(0.8 * len(others)), replace=False)
        self._train = np.frombuffer(b"".join(others[place] for place in chosen), np.uint8)
        self._held_out = np.frombuffer(b"".join(files[9::10]), np.uint8)

    def draw(self, *, is_train: bool = True) -> Tensor:
        """Return one new block, shape (`length`,)."""
        codes = self._train if is_train else self._held_out
        start = self._rng.integers(len(codes) - self._length + 1)
        return torch.from_numpy(codes[start : start + self._length].astype(np.int64))


def _split(
    inputs: Tensor, targets: Tensor, seed: int, *, validation: float, classes: int = 0, vocabulary: int = 0
) -> Data:
    from sklearn.model_selection import train_test_split

    train, held_out = train_test_split(np.arange(len(inputs)), test_size=validation, random_state=seed)
    return Data((inputs[train], targets[train]), (inputs[held_out], targets[held_out]), classes, vocabulary)


def _blocks(codes: Tensor, count: int, rng: np.random.Generator, *, is_train: bool) -> Tensor:
    """Draw blocks of a text, shape (count, `BLOCK`): from each tenth stretch to validate, from the rest to train."""
    starts = np.arange(len(codes) - BLOCK + 1)
    first, last = (place // _STRETCH % 10 == 9 for place in (starts, starts + BLOCK - 1))
    fitting = starts[~first & ~last] if is_train else starts[first & last]
    return torch.stack([codes[start : start + BLOCK] for start in rng.choice(fitting, count)])
