"""A backward that goes through no forward of the wrapper is this rank's own affair."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hostile.table import program
from hostile.training import Head, steps


def _fisher_information(DDP, record, batches):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(8, 16, generator=generator)
        y = torch.randint(0, 4, (8,), generator=generator)
        return nn.functional.cross_entropy(model(x), y)

    for _ in range(20):
        optimizer.zero_grad()
        loss_of(ddp).backward()
        optimizer.step()
    record.model("trained", net)
    fisher = [torch.zeros_like(param) for param in net.parameters()]
    for _ in range(batches):
        net.zero_grad()
        loss_of(net).backward()
        for total, param in zip(fisher, net.parameters(), strict=True):
            total += param.grad.detach() ** 2
    for number, total in enumerate(fisher):
        dist.all_reduce(total)
        record(f"Fisher information {number}", total)
    record.model("end", net)


@program()
def fisher_information(DDP, record):
    """Elastic weight consolidation: each rank squares gradients of ``ddp.module``.

    Stock: they are this rank's own; the program itself adds up the squares of all ranks.
    """
    _fisher_information(DDP, record, batches=20)


@program()
def fisher_information_uneven(DDP, record):
    """The same, where rank 1 has fewer batches than rank 0.

    Stock: legal, since nothing is synchronised there.
    """
    _fisher_information(DDP, record, batches=3 if dist.get_rank() else 5)


def _grad_cam(net: nn.Sequential) -> Tensor:
    seen: list[Tensor] = []
    handle = net[0].register_forward_hook(lambda module, args, output: seen.append(output))
    out = net(torch.linspace(-1, 1, 64).view(1, 1, 8, 8))
    handle.remove()
    (features,) = seen
    features.retain_grad()
    out.max().backward()
    return (features.grad.mean((2, 3), keepdim=True) * features).sum(1).relu()


@program()
def grad_cam_every_epoch(DDP, record):
    """Rank 0 makes a Grad-CAM of ``ddp.module`` every six steps, with hooks and a backward.

    Stock: its own affair, and the buffers of BatchNorm go on as rank 0 has them.
    """
    rank = dist.get_rank()
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(24):
        optimizer.zero_grad()
        ddp(torch.randn(4, 1, 8, 8, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        optimizer.step()
        if rank == 0 and step % 6 == 5:
            net.eval()
            record(f"map of step {step}", _grad_cam(net))
            net.train()
            optimizer.zero_grad()


@program()
def local_and_global_wrappers(DDP, record):
    """Two wrappers of one module with different groups: steps of a rank alone, and steps of all.

    Stock: each wrapper reduces what goes through its own forwards.
    """
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    everyone = DDP(net)
    alone = DDP(net, process_group=groups[dist.get_rank()])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(24):
        is_global = step % 4 == 3
        optimizer.zero_grad()
        ddp = everyone if is_global else alone
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        optimizer.step()
        if is_global:
            for param in net.parameters():
                dist.all_reduce(param.data)
                param.data /= dist.get_world_size()


@program()
def old_wrapper_on_one_rank(DDP, record):
    """The module is wrapped anew, while rank 0 alone (its logger, say) still holds the old
    wrapper.

    Stock: the old one has nothing to do with forwards of the new one.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    generator = torch.Generator().manual_seed(rank)
    watched = []
    for phase in range(2):
        ddp = DDP(net)
        if rank == 0:
            watched.append(ddp)
        for step in steps(ddp, 10, 8, 16, generator=generator):
            record.model(f"phase {phase}, step {step}", net)


@program()
def personal_steps(DDP, record):
    """Personalised federated learning: steps of all through the wrapper, then a few of each rank's
    own.

    Those go through ``ddp.module``, and are taken back. Stock: they are local.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for round_ in range(4):
        for _ in steps(ddp, 6, 8, 16, generator=generator):
            pass
        of_all = copy.deepcopy(net.state_dict())
        for _ in range(4):
            optimizer.zero_grad()
            (net(torch.randn(8, 16, generator=generator)) - rank).pow(2).mean().backward()
            optimizer.step()
        record.model(f"round {round_}, personal", net)
        net.load_state_dict(of_all)
    record.model("end", net)


@program()
def saliency_on_one_rank(DDP, record):
    """Rank 0 alone makes a saliency map through ``ddp.module``.

    Stock: its own affair, for no backward through the bare module is synchronised.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        x = torch.randn(8, 16, generator=generator)
        y = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        record.model(f"step {step}", net)
        optimizer.step()
        if rank == 0 and step == 10:
            picture = torch.ones(2, 16, requires_grad=True)
            net(picture).max(1).values.sum().backward()
            record("saliency map", picture.grad)
            optimizer.zero_grad()


@program()
def uneven_microbatches(DDP, record):
    """An actor and a critic share an encoder; the actor accumulates as many microbatches as a rank
    has.

    Stock: another number of backwards under ``no_sync`` on each rank is legal, also for the
    wrapper whose parameters they reach without its doing.
    """
    rank = dist.get_rank()
    encoder = nn.Linear(16, 32)
    actor, critic = DDP(Head(encoder, 4)), DDP(Head(encoder, 1))
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.module.head.parameters()], lr=0.05)
    generator = torch.Generator().manual_seed(rank)

    def loss_of(model: nn.Module) -> Tensor:
        return model(torch.randn(8, 16, generator=generator)).pow(2).mean()

    for step in range(20):
        optimizer.zero_grad()
        with actor.no_sync():
            for _ in range(2 + rank):
                loss_of(actor).backward()
        loss_of(actor).backward()
        record.model(f"step {step}, actor", actor)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(critic).backward()
        record.model(f"step {step}, critic", critic)
        optimizer.step()
