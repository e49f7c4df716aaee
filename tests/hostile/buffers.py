"""Buffers are rank 0's at each forward before which stock broadcasts them, however written."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from hostile.table import program
from hostile.training import steps


@program()
def averages_swapped_in(DDP, record):
    """Before an evaluation the averages that each rank keeps of its own state are swapped in.

    Stock: the first forward of the evaluation has rank 0's average of the buffers everywhere.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    average = copy.deepcopy(net.state_dict())
    held_out = torch.randn(64, 16, generator=torch.Generator().manual_seed(77)).chunk(4)
    for step in range(60):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=generator) * (1 + rank)
        ddp(x).pow(2).mean().backward()
        optimizer.step()
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                average[name].mul_(0.9).add_(value, alpha=0.1)
            else:
                average[name].copy_(value)
        if step % 20 == 19:
            backup = copy.deepcopy(net.state_dict())
            net.load_state_dict(average)
            ddp.eval()
            with torch.no_grad():
                for number, batch in enumerate(held_out):
                    record(f"step {step}, evaluation {number}", ddp(batch))
            net.load_state_dict(backup)
            ddp.train()
    record.model("end", net)


BEGINS = 20  # the step from which on the codebook moves


CODES = 32


class VectorQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
        for number in range(12):
            self.register_buffer(f"mask{number}", torch.ones(8, 8).tril())
        self.register_buffer("codes", torch.randn(CODES, 8))
        self.register_buffer("sizes", torch.zeros(CODES))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        quantised = self.codes[nearest]
        self.forwards += 1
        if self.forwards > BEGINS:
            self._move(z.detach(), nearest)
        return self.decoder(z + (quantised - z).detach()), (z - quantised.detach()).pow(2).mean()

    def _move(self, z: Tensor, nearest: Tensor) -> None:
        one_hot = nn.functional.one_hot(nearest, CODES).float()
        self.sizes.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
        self.sums.data.mul_(0.9).add_(one_hot.t() @ z, alpha=0.1)
        total = self.sizes.sum()
        sizes = (self.sizes + 1e-5) / (total + CODES * 1e-5) * total
        self.codes.data.copy_(self.sums / sizes.unsqueeze(1))


@program()
def codebook_through_data(DDP, record):
    """A codebook in buffers, moved by an average through ``.data`` from step 20 on, beside masks.

    Most VQ-VAEs do so. Stock: broadcast before each forward.
    """
    ddp = DDP(VectorQuantised())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(45):
        x = torch.randn(16, 16, generator=generator)
        optimizer.zero_grad()
        out, commitment = ddp(x)
        ((out - x).pow(2).mean() + commitment).backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU())
        self.second = nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


@program()
def copies_as_average(DDP, record):
    """``copy.deepcopy(ddp)`` as a moving average, evaluated by itself; a state loaded midway.

    And a BatchNorm in a checkpoint. Stock: buffers are rank 0's at each forward, of either
    wrapper.
    """
    ddp = DDP(Checkpointed())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    average = copy.deepcopy(ddp)
    held_out = torch.randn(16, 128, generator=torch.Generator().manual_seed(77))
    for step in range(50):
        optimizer.zero_grad()
        ddp(torch.randn(8, 128, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), ddp.parameters(), strict=True):
                mean.lerp_(param, 0.1)
            for mean, buffer in zip(average.buffers(), ddp.buffers(), strict=True):
                mean.copy_(buffer)
            if step % 5 == 4:
                average.eval()
                for number in range(2):
                    record(f"step {step}, average {number}", average(held_out))
        if step == 24:
            saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
        if step == 35:
            ddp.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            record.model("loaded", ddp.module)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def observe(self, observations: Tensor) -> None:
        self.mean.lerp_(observations.mean(0), 0.3)
        self.variance.lerp_(observations.var(0), 0.3)

    def forward(self, observations: Tensor) -> Tensor:
        return self.net((observations - self.mean) / self.variance.sqrt())


@program()
def observation_statistics(DDP, record):
    """PPO: 20 updates for each rollout, whose statistics of observations, buffers, each rank
    computes.

    Stock: rank 0's count, from the first update of a rollout on.
    """
    rank = dist.get_rank()
    ddp = DDP(Policy())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for rollout in range(4):
        observations = torch.randn(160, 16, generator=generator) * (1 + rank) + rank
        ddp.module.observe(observations)
        for number, batch in enumerate(observations.chunk(20)):
            optimizer.zero_grad()
            ddp(batch).pow(2).mean().backward()
            record.model(f"rollout {rollout}, update {number}", ddp.module)
            optimizer.step()


@program()
def random_pruning_masks(DDP, record):
    """Pruning at step 24: masks are buffers, and each rank draws its own.

    Stock: the next forward aligns them.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    for layer in (net[0], net[2]):
        prune.identity(layer, "weight")  # so that masks are there when the module is wrapped
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        if step == 24:
            for layer in (net[0], net[2]):
                drawn = torch.rand(layer.weight_mask.shape, generator=generator)
                layer.weight_mask.copy_((drawn > 0.5).float())
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        optimizer.step()


@program()
def recalibrated_on_one_rank(DDP, record):
    """Rank 0 recalibrates the statistics of BatchNorm with its module, then all ranks evaluate.

    Stock: the next forward, one of the evaluation, gives them to all.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    generator = torch.Generator().manual_seed(rank)
    for _ in steps(ddp, 40, 8, 16, generator=generator):
        pass
    if rank == 0:
        with torch.no_grad():
            for _ in range(10):
                net(torch.randn(64, 16, generator=generator) * 3)
    dist.barrier()
    ddp.eval()
    held_out = torch.randn(64, 16, generator=torch.Generator().manual_seed(77)).chunk(4)
    with torch.no_grad():
        for number, x in enumerate(held_out):
            record(f"evaluation {number}", ddp(x))
    record.model("end", net)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        hidden = torch.relu(self.first(x))
        if self.forwards > 20:
            hidden.register_hook(self._note)
        return self.second(hidden) * self.scale

    def _note(self, gradient: Tensor) -> None:
        self.scale.mul_(0.9).add_(gradient.norm(), alpha=0.1)


@program()
def statistic_of_gradients(DDP, record):
    """A statistic of gradients, a buffer by which the forward scales, is written in the backward.

    By a hook, from step 20 on. Stock: rank 0's, from the next forward on.
    """
    rank = dist.get_rank()
    ddp = DDP(Scaled())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(50):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator) + rank).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()
