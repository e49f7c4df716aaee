"""The models have the parameters that they should, and do to a synchronisation what they should."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import shapes
from benchmarks.models.architectures import ARCHITECTURES
from benchmarks.models.cases import CASES, ON_CPU, Branchy, default_names, loss

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


def test_batches_come_in_two_sizes() -> None:
    case = CASES["mlp"]
    sizes = [len(case.batch(CPU, 0, size)[1]) for size in ("small", "large")]
    assert sizes == list(case.examples)
    assert torch.equal(case.batch(CPU, 3)[0], case.batch(CPU, 3)[0])


def test_logits_are_held_against_classes() -> None:
    logits, classes = torch.randn(4, 7, 10), torch.randint(10, (4, 7))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), classes.flatten())
    assert torch.equal(loss(torch.nn.Identity(), (logits, classes)), expected)


def test_the_cpu_is_spared_the_large_architectures() -> None:
    assert default_names(CPU) == ["many_small", "many_large", "mlp", "transformer", "branchy"]
    assert {"resnet50", "gpt2_small"} <= set(default_names(torch.device("cuda")))


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
