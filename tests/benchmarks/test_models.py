"""The models have the parameters that they should, and the default bucket sizes suit them."""

import pytest
import torch

from benchmarks.gpu import overlap
from benchmarks.models.architectures import ARCHITECTURES, ViTBase
from benchmarks.models.cases import CASES, Branchy, loss

CPU = torch.device("cpu")
# From torchvision 0.28 and transformers 5.23.
PUBLISHED = {
    "resnet50": (161, 25_557_032),
    "vit_b16": (152, 86_567_656),
    "gpt2_small": (148, 124_439_808),
    "llama3_8b_layer": (9, 218_112_000),
}
IMAGES = torch.empty(2, 3, 64, 32, device="meta")
MODELS = {**ARCHITECTURES, "vit_b16": ViTBase}
INPUTS = {
    "vit_b16": torch.empty(2, 3, 224, 224, device="meta"),
    "gpt2_small": torch.zeros(2, 5, dtype=torch.int64, device="meta"),
    "llama3_8b_layer": torch.empty(2, 5, 4096, device="meta"),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_published_model_and_all_have_gradients(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    params = list(model.parameters())
    assert (len(params), sum(param.numel() for param in params)) == PUBLISHED[name]
    model(INPUTS.get(name, IMAGES)).sum().backward()
    assert all(param.grad is not None for param in params)


def test_a_batch_uses_its_own_experts_and_the_same_in_every_model() -> None:
    def used(model: torch.nn.Module, seed: int) -> list[str]:
        model.zero_grad()
        loss(model, CASES["branchy"].batch(CPU, seed)).backward()
        return [name for name, param in model.named_parameters() if param.grad is not None]

    one, other = CASES["branchy"].model(CPU), CASES["branchy"].model(CPU)
    first = used(one, seed=0)
    assert len(first) == 2 * Branchy.BLOCKS * Branchy.CHOSEN  # weights and biases
    assert first == used(other, seed=0)
    assert first != used(other, seed=1)


# The model of overlap on CUDA devices


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", overlap.BACKWARD)
def test_the_default_sizes_expose_no_more_than_those_of_stock(name: str, speed: float) -> None:
    for row in overlap.rows([name], [450, 200, 50], speed=speed):
        seconds = row["seconds"]
        for ours, stock in (("ours two", "stock copies"), ("ours views", "stock views")):
            # The latency of one more bucket, and the time to gather the whole last one.
            assert seconds[ours] <= 1.01 * seconds[stock] + 2e-6, (row["bus"], ours)
