"""find_unused_parameters=False is as strict as stock, not stricter."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hostile.table import Expected, program
from hostile.training import Head


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.noise(x)


@program()
def adversarial_inputs(DDP, record):
    """A residual denoiser: ``backward(inputs=[x])`` first, then the backward that trains.

    Adversarial training, with ``find_unused_parameters=False`` said. Stock: the first one
    reaches no parameter, and misses none.
    """
    ddp = DDP(Denoiser(), find_unused_parameters=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(24):
        clean = torch.randn(8, 16, generator=generator)
        x = (clean + 0.1).requires_grad_()
        (ddp(x) - clean).pow(2).mean().backward(inputs=[x])
        record(f"step {step}, gradient of the input", x.grad)
        worse = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        (ddp(worse) - clean).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


OUTSIDE = Expected(
    "`torch.compile` of the wrapper: a parameter gets a use outside of the graph in a later step",
    error=r"gradient of 'layers\.5\.weight' was sent when the compiled backward had made it",
)


@program(expected=OUTSIDE)
def penalty_outside_of_the_graph(DDP, record):
    """``torch.compile(ddp)``, and from step 10 on at times a penalty outside of the graph.

    Stock: works, its hooks wait for the whole gradient.
    """
    ddp = DDP(Tower())
    compiled = torch.compile(ddp, backend="aot_eager")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(24):
        optimizer.zero_grad()
        loss = compiled(torch.randn(8, 512, generator=generator)).pow(2).mean()
        if step >= 10 and step % 5 == 0:
            loss = loss + 0.1 * ddp.module.layers[5].weight.pow(2).sum()
        loss.backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()


class Task(nn.Module):
    def __init__(self, net: nn.Module, outputs: int) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Trainer:
    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        ddp.trainer = self


@program()
def rewrapped_with_views(DDP, record):
    """A net with gradients as views is wrapped anew, while the old wrapper lies in a reference
    cycle.

    A trainer holds it and is held by it. Stock: works.
    """
    net = nn.Linear(16, 16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for phase in range(3):
        trainer = Trainer(DDP(Task(net, 2 + phase), gradient_as_bucket_view=True))
        optimizer = torch.optim.SGD(trainer.ddp.parameters(), lr=0.05)
        for step in range(8):
            optimizer.zero_grad()
            trainer.ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
            record.model(f"phase {phase}, step {step}", trainer.ddp.module)
            optimizer.step()


@program()
def separate_regulariser(DDP, record):
    """A regulariser has a backward of its own, by the parameters alone.

    With ``find_unused_parameters=False`` said. Stock: that backward is local, and its gradients
    are added to the means.
    """
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net, find_unused_parameters=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        penalty = sum(param.pow(2).sum() for param in (net[0].weight, net[2].weight))
        (0.01 * penalty).backward()
        record.model(f"step {step}", net)
        optimizer.step()


@program()
def shared_encoder(DDP, record):
    """An actor and a critic share an encoder, with ``find_unused_parameters=False`` said.

    Stock: what the backward of one wrapper gives to parameters of the other is none of that
    one's business.
    """
    encoder = nn.Linear(16, 32)
    actor, critic = (
        DDP(Head(encoder, outputs), find_unused_parameters=False) for outputs in (4, 1)
    )
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.module.head.parameters()], lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        for title, model in {"actor": actor, "critic": critic}.items():
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
            record.model(f"step {step}, {title}", model)
            optimizer.step()
