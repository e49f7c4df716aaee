"""Parameter lists of well-known models, as shapes alone: what the kernels see of a model."""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """torchvision's ResNet-50: 161 tensors, 25,557,032 elements, from 64 to 2,359,296 each."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])  # and BatchNorm

    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)  # the shortcut
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def gpt2_small() -> list[Shape]:
    """GPT-2 small, embeddings tied: 148 tensors, 124,439,808 elements."""
    d = 768
    layer: list[Shape] = [
        *[(d,), (d,)],
        *[(d, 3 * d), (3 * d,), (d, d), (d,)],
        *[(d,), (d,)],
        *[(d, 4 * d), (4 * d,), (4 * d, d), (d,)],
    ]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


def llama3_8b_layer() -> list[Shape]:
    """One layer of Llama 3 8B: 9 tensors, 218,112,000 elements."""
    d, keys, hidden = 4096, 1024, 14336
    attention: list[Shape] = [(d, d), (keys, d), (keys, d), (d, d)]
    return [*attention, (hidden, d), (hidden, d), (d, hidden), (d,), (d,)]


def many_small() -> list[Shape]:
    """1,000 vectors of 64 elements."""
    return [(64,)] * 1000


PARAMETER_LISTS = {
    "resnet50": resnet50,
    "gpt2_small": gpt2_small,
    "llama3_8b_layer": llama3_8b_layer,
    "many_small": many_small,
}
