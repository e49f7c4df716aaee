"""What the kernel benchmark times is right, and what is not right it does not time."""

import dataclasses

import pytest
import torch

from benchmarks.kernels.contenders import CEILING, DIRECTIONS, OURS, Inputs, check, contenders

CPU = torch.device("cpu")
SHAPES = [(3, 4), (5,), (2, 3, 2, 1), (1100, 1000), (1,)]  # two segments


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return Inputs.make(SHAPES, dtype, CPU)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_contender_passes_the_check(direction, dtype):
    rivals = contenders(direction, CPU)
    assert {OURS, CEILING} < {each.name for each in rivals}
    for contender in rivals:
        check(direction, contender, make(dtype))


def _unscaled(contender):
    def run(inputs):
        torch._foreach_copy_(contender.buffer(inputs).views, inputs.grads)
        contender.buffer(inputs).flags.fill_(1)

    return run


def _flags_forgotten(contender):
    def run(inputs):
        contender.run(inputs)
        contender.buffer(inputs).flags[-1] = 0

    return run


@pytest.mark.parametrize(
    ("direction", "name", "mistake"),
    [
        ("flatten", CEILING, _unscaled),
        ("flatten", OURS, _unscaled),
        ("flatten", OURS, _flags_forgotten),
        ("flatten", "mul_out each", _unscaled),
    ],
)
def test_the_check_finds_a_planted_mistake(direction, name, mistake):
    (contender,) = (each for each in contenders(direction, CPU) if each.name == name)
    wrong = dataclasses.replace(contender, run=mistake(contender))
    with pytest.raises(RuntimeError, match=f"{direction} by '{name}'"):
        check(direction, wrong, make())
