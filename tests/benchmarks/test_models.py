"""The models have the parameters that they should, and do to a synchronisation what they should."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.architectures import ARCHITECTURES
from benchmarks.models.cases import CASES, ON_CPU, Branchy, loss

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [case for case in ON_CPU if not case.unused], ids=lambda c: c.name)
def test_every_parameter_has_a_gradient_that_is_not_zero(case) -> None:
    model = case.model(CPU)
    loss(model, case.batch(CPU, seed=0)).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.any(), name


def test_a_batch_takes_its_own_experts_and_the_same_in_every_model() -> None:
    def used(model: torch.nn.Module, seed: int) -> list[str]:
        model.zero_grad()
        loss(model, CASES["branchy"].batch(CPU, seed)).backward()
        return [name for name, param in model.named_parameters() if param.grad is not None]

    one, other = CASES["branchy"].model(CPU), CASES["branchy"].model(CPU)
    first = used(one, seed=0)
    assert len(first) == 2 * Branchy.BLOCKS * Branchy.CHOSEN  # weights and biases
    assert len(list(one.parameters())) == 2 * 400
    assert first == used(other, seed=0)
    assert first != used(other, seed=1)


# From torchvision 0.28 and transformers 5.23.
PUBLISHED = {
    "resnet50": (161, 25_557_032),
    "vit_b16": (152, 86_567_656),
    "gpt2_small": (148, 124_439_808),
    "llama3_8b_layer": (9, 218_112_000),
}
IMAGES = torch.empty(2, 3, 64, 32, device="meta")
INPUTS = {
    "resnet50": (IMAGES, (2, 1000)),
    "vit_b16": (IMAGES, (2, 1000)),
    "gpt2_small": (torch.zeros(2, 5, dtype=torch.int64, device="meta"), (2, 5, 50257)),
    "llama3_8b_layer": (torch.empty(2, 5, 4096, device="meta"), (2, 5, 4096)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_the_published_model(name):
    with torch.device("meta"):
        params = list(ARCHITECTURES[name]().parameters())
    assert (len(params), sum(param.numel() for param in params)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_have_the_promised_shape_and_reach_every_parameter(name):
    inputs, expected = INPUTS[name]
    with torch.device("meta"):
        model = ARCHITECTURES[name]()
    outputs = model(inputs)
    assert outputs.shape == expected
    outputs.sum().backward()
    assert all(param.grad is not None for param in model.parameters())
