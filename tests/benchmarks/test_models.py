"""The models have the published parameters, and the default bucket sizes suit them."""

import pytest
import torch

from benchmarks.gpu import overlap
from benchmarks.models.architectures import ARCHITECTURES, ViTBase

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


@pytest.mark.parametrize("name", overlap.BACKWARD)
def test_the_default_sizes_expose_no_more_than_those_of_stock(name: str) -> None:
    """In the model of overlap on CUDA devices."""
    for row in overlap.rows([name], [450, 200, 50], speed=1.0):
        seconds = row["seconds"]
        for ours, stock in (("ours two", "stock copies"), ("ours views", "stock views")):
            # The latency of one more bucket, and the time to gather the last bucket.
            assert seconds[ours] <= 1.01 * seconds[stock] + 2e-6, (row["bus"], ours)
