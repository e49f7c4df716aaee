"""Programs that stock DDP refuses, or gets wrong: table "Programs" of docs/differences.md."""

import torch
from oracle import Net
from torch import Tensor, nn
from torch.func import jacfwd, jacrev, jvp
from torch.utils.checkpoint import checkpoint

from differential.named.models import Normalized, OfBatches, batch
from differential.named.table import RIGHT, TRANSFORM, TWICE, WRONG, program


class Answer:
    """The output of a model: an object of a class of the user."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layer(x))

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch()).logits.square().sum()


class Adapted(OfBatches):
    """As in AdaLoRA: a reentrant checkpoint, and a penalty on the weights in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, self.stem(x), use_reentrant=True)
        weight = self.layer.weight
        identity = torch.eye(4, dtype=weight.dtype)
        return x.square().sum() + (weight @ weight.T - identity).square().sum()


class OfImages(OfBatches):
    """Two convolutions; a batch has one row for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        images = x.repeat(1, 2).reshape(-1, 2, 2, 2)
        return self.layers(images.to(memory_format=torch.channels_last))


def normalized() -> nn.Module:
    return Normalized().eval()


@program(TRANSFORM, TRANSFORM, model=normalized)
def jacobians(net: Net, rank: int, step: int) -> None:
    x = batch(False)
    both = jacfwd(net)(x).sum() + jacrev(net)(x).sum()
    (both + jvp(net, (x,), (torch.ones_like(x),))[1].sum()).backward()


@program(RIGHT, TWICE, model=Answers)
def output_of_the_users_class(net: Net, rank: int, step: int) -> None:
    net(batch()).logits.square().sum().backward()


@program(TWICE, TWICE, model=Adapted)
def penalty_on_a_checkpointed_layer(net: Net, rank: int, step: int) -> None:
    net(batch()).backward()


@program(WRONG, WRONG, model=normalized)
def converted_to_half_and_back(net: Net, rank: int, step: int) -> None:
    net.half()
    net.double()
    net(batch()).square().sum().backward()


@program(WRONG, WRONG, model=OfImages)
def converted_to_channels_last(net: Net, rank: int, step: int) -> None:
    net.to(memory_format=torch.channels_last)
    net(batch()).square().sum().backward()
