"""Well-known models as plain modules, with exactly the parameters of the published ones.

Number, order and shapes of the parameters match the modules of torchvision and Hugging Face, and so
do the outputs for given parameters; initial values are torch's defaults or similar. There is no
dropout and no stochastic depth, so that gradients of two runs can be compared bitwise. All models
can be built on the meta device::

    with torch.device("meta"):
        shapes = [param.shape for param in ResNet50().parameters()]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu


def _split_heads(x: Tensor, size: int) -> Tensor:
    """``(N, T, heads * size)`` to ``(N, heads, T, size)``."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    """The inverse of :func:`_split_heads`."""
    return x.transpose(1, 2).flatten(2)


# ResNet-50


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a shortcut; the middle one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + self.shortcut(x)).relu()


class ResNet50(nn.Module):
    """torchvision's ``resnet50``: 161 tensors, 25,557,032 parameters.

    Images ``(N, 3, H, W)`` to logits ``(N, 1000)``. BatchNorm needs two values per channel in the
    last stage: more than one image, or images of more than 32 x 32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for width, repeats, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(repeats):
                blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


# ViT-B/16


class ViTBlock(nn.Module):
    """Attention and MLP, each with a pre-LayerNorm and a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ViTBase(nn.Module):
    """torchvision's ``vit_b_16``: 152 tensors, 86,567,656 parameters.

    Images ``(N, 3, 224, 224)`` to logits ``(N, 1000)``. The position embedding is registered before
    the patch embedding; in torchvision, after it.
    """

    def __init__(self) -> None:
        super().__init__()
        width, patches = 768, 14**2
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + patches, width))
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.blocks = nn.Sequential(*(ViTBlock(width, heads=12) for _ in range(12)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(patches), -1, -1), patches], dim=1)
        return self.head(self.norm(self.blocks(x + self.positions))[:, 0])


# GPT-2 small


class Conv1D(nn.Module):
    """A linear layer whose weight is ``(inputs, outputs)``, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GPT2Block(nn.Module):
    """Causal attention and MLP, each with a pre-LayerNorm and a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = Conv1D(width, 3 * width)
        self.out = Conv1D(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            Conv1D(width, 4 * width), nn.GELU(approximate="tanh"), Conv1D(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            _split_heads(part, self.head_size) for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(_join_heads(scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.mlp(self.ln_2(x))


class GPT2Small(nn.Module):
    """Hugging Face's ``gpt2``: 148 tensors, 124,439,808 parameters; the head is the embedding.

    Tokens ``(N, T)``, int64, at most 1,024 of them, to logits ``(N, T, 50257)``.
    """

    vocabulary = 50257

    def __init__(self) -> None:
        super().__init__()
        width = 768
        self.tokens = nn.Parameter(0.02 * torch.randn(self.vocabulary, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1024, width))
        self.blocks = nn.Sequential(*(GPT2Block(width, heads=12) for _ in range(12)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = nn.functional.embedding(tokens, self.tokens)
        x = self.blocks(embedded + self.positions[: tokens.shape[1]])
        return linear(self.norm(x), self.tokens)


# Llama 3 8B


class Llama3Layer(nn.Module):
    """One of the 32 decoder layers of Llama 3 8B: 9 tensors, 218,112,000 parameters.

    Hidden states ``(N, T, 4096)`` to hidden states of the same shape. Causal attention with 32
    query heads and 8 key and value heads, rotary positions, RMSNorm, SwiGLU.
    """

    width, hidden, head_size, query_heads, key_heads = 4096, 14336, 128, 32, 8

    def __init__(self) -> None:
        super().__init__()
        queries, keys = self.query_heads * self.head_size, self.key_heads * self.head_size
        self.q = nn.Linear(self.width, queries, bias=False)
        self.k = nn.Linear(self.width, keys, bias=False)
        self.v = nn.Linear(self.width, keys, bias=False)
        self.o = nn.Linear(queries, self.width, bias=False)
        self.gate = nn.Linear(self.width, self.hidden, bias=False)
        self.up = nn.Linear(self.width, self.hidden, bias=False)
        self.down = nn.Linear(self.hidden, self.width, bias=False)
        self.norm_1 = nn.RMSNorm(self.width, eps=1e-5)
        self.norm_2 = nn.RMSNorm(self.width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (_split_heads(each(y), self.head_size) for each in (self.q, self.k, self.v))
        cos, sin = self._rotation(x)
        y = scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(_join_heads(y))
        y = self.norm_2(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))

    def _rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles by position and frequency: ``(T, head_size)``."""
        frequencies = 500_000.0 ** -(
            torch.arange(0, self.head_size, 2, device=x.device) / self.head_size
        )
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), frequencies).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "resnet50": ResNet50,
    "gpt2_small": GPT2Small,
    "llama3_8b_layer": Llama3Layer,
}
