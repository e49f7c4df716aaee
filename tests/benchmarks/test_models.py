"""The models do to a gradient synchronisation what they are there for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from models import CASES, ON_CPU, Branchy, default_names, loss

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
