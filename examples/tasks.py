"""The tasks of the examples: data that exists on every machine, and models for it.

A task has two pairs of tensors (training and held-out data) and a function that creates its model.
For both pairs, ``cross_entropy(model(inputs), targets)`` is the loss, in nats per target.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, scaled_dot_product_attention


class UsageError(Exception):
    """The example cannot run as requested. The message is one line with the remedy."""


@dataclass(frozen=True)
class Task:
    """Data, model and good settings of one problem. Sizes count samples (first dimension).

    Attributes:
        target: name of one target, for "nats per ...".
        inputs, targets: training data.
        held_out_inputs, held_out_targets: data that is not used in training.
        baselines: held-out loss of simpler predictors, in nats per target.
        steps, batch_size, lr: defaults; ``batch_size`` counts samples per rank.
    """

    name: str
    target: str
    make_model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor
    baselines: dict[str, float]
    steps: int
    batch_size: int
    lr: float


# --- digits -----------------------------------------------------------------------------------


def digits() -> Task:
    """Handwritten digits of 8 x 8 pixels, 1,797 of them; every fifth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("--task digits needs scikit-learn: pip install scikit-learn") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # N x 1 x 8 x 8
    labels = torch.tensor(data.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 4
    counts = one_hot(labels[~held_out], 10).sum(0).float()
    return Task(
        name="digits",
        target="digit",
        make_model=ConvNet,
        inputs=images[~held_out],
        targets=labels[~held_out],
        held_out_inputs=images[held_out],
        held_out_targets=labels[held_out],
        baselines={"frequencies of the digits": _table_loss(counts, labels[held_out])},
        steps=300,
        batch_size=32,
        lr=3e-3,
    )


class ConvNet(nn.Sequential):
    """Three convolutions with batch normalization: N x 1 x 8 x 8 pixels to N x 10 logits."""

    def __init__(self) -> None:
        super().__init__(
            *self._block(1, 32),
            *self._block(32, 64),
            nn.MaxPool2d(2),
            *self._block(64, 64),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 10),
        )

    @staticmethod
    def _block(channels_in: int, channels_out: int) -> list[nn.Module]:
        # No bias: the batch normalization has one.
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU()]


# --- text -------------------------------------------------------------------------------------

CONTEXT = 128  # characters that the transformer sees
VOCABULARY = 96  # newline and printable ASCII; other characters become "?"
MAX_BYTES = 16_000_000  # maximum size of the source text
MAX_HELD_OUT = 128_000  # held-out characters: enough for two digits, seconds to evaluate


def text() -> Task:
    """Source text of Python's standard library, character by character.

    Reads the ``.py`` files of the running Python in sorted order, without its tests and installed
    packages. Every twentieth file is held out.
    """
    training, held_out = _standard_library()
    held_out = held_out[:MAX_HELD_OUT]
    pairs = torch.bincount(training[:-1] * VOCABULARY + training[1:], minlength=VOCABULARY**2)
    pairs = pairs.view(VOCABULARY, VOCABULARY).float() + 1
    inputs, targets = _windows(training)
    held_out_inputs, held_out_targets = _windows(held_out)
    return Task(
        name="text",
        target="character",
        make_model=Transformer,
        inputs=inputs,
        targets=targets,
        held_out_inputs=held_out_inputs,
        held_out_targets=held_out_targets,
        baselines={
            "frequencies of characters": _table_loss(pairs.sum(0), held_out[1:]),
            "frequencies of character pairs": _table_loss(pairs[held_out[:-1]], held_out[1:]),
        },
        steps=320,
        batch_size=16,
        lr=3e-3,
    )


def _standard_library() -> tuple[Tensor, Tensor]:
    """Return training and held-out text as character numbers, int64."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(
        (path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for i, path in enumerate(files):
        source = path.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
        parts[i % 20 == 19].append(source)
        size += len(source)
        if size > MAX_BYTES:
            break
    if size < 1_000_000:
        raise UsageError(f"too little Python source under {root}: use --task digits")
    return _encode(b"".join(parts[0])), _encode(b"".join(parts[1]))


def _encode(source: bytes) -> Tensor:
    numbers = torch.full((256,), ord("?") - 31)
    numbers[ord("\n")] = 0
    numbers[32:127] = torch.arange(1, VOCABULARY)
    return numbers[torch.frombuffer(bytearray(source), dtype=torch.uint8).long()]


def _windows(characters: Tensor) -> tuple[Tensor, Tensor]:
    """Return windows of ``CONTEXT`` characters, and the next character for each character."""
    count = (len(characters) - 1) // CONTEXT
    used = characters[: count * CONTEXT + 1]
    return used[:-1].view(count, CONTEXT), used[1:].view(count, CONTEXT)


class Transformer(nn.Module):
    """A small causal transformer: N x T character numbers to N x T x ``VOCABULARY`` logits."""

    def __init__(self, width: int = 128, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, numbers: Tensor) -> Tensor:
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        hidden = self.characters(numbers) + self.positions(positions)
        return self.head(self.norm(self.blocks(hidden)))


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a pre-norm and a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # N x heads x T x width / heads
            for part in self.query_key_value(self.norm1(hidden)).chunk(3, dim=-1)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.norm2(hidden))


def _table_loss(counts: Tensor, targets: Tensor) -> float:
    """Return the loss of predicting from counts: one row for all targets, or one row each."""
    return cross_entropy(counts.log().expand(len(targets), -1), targets).item()


TASKS = {"digits": digits, "text": text}
