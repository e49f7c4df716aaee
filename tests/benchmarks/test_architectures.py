"""The benchmarks' models have the parameters of the published ones, and run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import shapes
from architectures import ARCHITECTURES

# From torchvision 0.28 and transformers 5.23.
PUBLISHED = {
    "resnet50": (161, 25_557_032),
    "efficientnet_b7": (711, 66_347_960),
    "vit_b16": (152, 86_567_656),
    "gpt2_small": (148, 124_439_808),
    "llama3_8b_layer": (9, 218_112_000),
}
IMAGES = torch.empty(2, 3, 64, 32, device="meta")
INPUTS = {
    "resnet50": (IMAGES, (2, 1000)),
    "efficientnet_b7": (IMAGES, (2, 1000)),
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


def test_real_values_give_every_resnet_parameter_a_gradient():
    torch.manual_seed(0)
    model = ARCHITECTURES["resnet50"]()
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(param.grad.norm() > 0 for param in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capped_bucket_is_one_that_reaches_25_mib(dtype):
    for name in ARCHITECTURES:
        bucket = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape in shapes.capped(shapes.whole(name), dtype)
        ]
        assert sum(bucket) >= 25 * 2**20 > sum(bucket[:-1])
    assert shapes.capped(shapes.whole(shapes.MANY_SMALL), dtype) == ()
