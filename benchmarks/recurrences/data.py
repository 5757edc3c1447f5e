"""The data of the trainings: bundled with Python or scikit-learn, or generated, so that no download is needed.

Each recurrence gets fresh data, as in production: its seed draws another sample.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
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
_CHAINS = 4


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


def images(seed: int, *, pixels: int, samples: int, contrast: float, classes: int = 10, device: str = "cpu") -> Data:
    """Return generated images of bytes, shape (n, 3, pixels, pixels): one wave pattern per class, in strong noise.

    The noise is uniform over all byte values, with a standard deviation of 74 levels; `contrast` is the standard
    deviation of the patterns, in levels. The last tenth of the images is used for validation.
    """
    waves = torch.Generator().manual_seed(0)  # a constant seed: all recurrences share the classes
    coarse = torch.randn(classes, 3, 8, 8, generator=waves)
    patterns = torch.nn.functional.interpolate(coarse, size=(pixels, pixels), mode="bilinear")
    levels = (contrast * patterns).round().to(torch.int16).to(device)
    source = torch.Generator(device).manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=source, device=device)
    noisy = torch.empty(samples, 3, pixels, pixels, dtype=torch.uint8, device=device)
    noisy.random_(0, 256, generator=source)
    for first in range(0, samples, 512):  # 16-bit integers of all images would fill over 1 GiB
        part = noisy[first : first + 512]
        part.copy_((part + levels[labels[first : first + 512]]).clamp_(0, 255))
    return _tail_validates(noisy, labels, classes=classes)


def sentences(seed: int, *, samples: int, length: int, vocabulary: int) -> Data:
    """Return generated text, shape (n, length), made of words from four Markov chains; the targets equal the inputs.

    Each word has eight possible successors with unequal odds, so that a language model can learn to predict them.
    """
    rng = np.random.default_rng(0)
    followers = rng.integers(2, vocabulary, (_CHAINS, vocabulary, 8))
    odds = np.cumsum([0.6, 0.2, 0.1, 0.04, 0.02, 0.02, 0.01, 0.01])
    rng = np.random.default_rng(seed)
    chains = rng.integers(0, _CHAINS, samples)
    words = np.empty((samples, length), dtype=np.int64)
    words[:, 0] = rng.integers(2, vocabulary, samples)
    for place in range(1, length):
        choice = np.minimum(np.searchsorted(odds, rng.random(samples)), 7)
        words[:, place] = followers[chains, words[:, place - 1], choice]
    texts = torch.from_numpy(words)
    return _tail_validates(texts, texts, vocabulary=vocabulary)


def _tail_validates(inputs: Tensor, targets: Tensor, *, classes: int = 0, vocabulary: int = 0) -> Data:
    """Split off the last tenth for validation, which is a random choice because generated samples have no order."""
    first = len(inputs) - len(inputs) // 10
    return Data((inputs[:first], targets[:first]), (inputs[first:], targets[first:]), classes, vocabulary)


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
