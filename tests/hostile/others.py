"""Scripted modules, old wrappers with views, hooks of the old kind, waits in callbacks."""

import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from hostile.table import Expected, program


def steps(
    ddp: nn.Module, count: int, *size: int, forward: Callable[[Tensor], Tensor] | None = None
) -> Iterator[Tensor]:
    """Steps of SGD on inputs of this rank: yields the loss of each behind its backward."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        optimizer.zero_grad()
        loss = (forward or ddp)(torch.randn(*size, generator=generator)).pow(2).mean()
        loss.backward()
        yield loss
        optimizer.step()


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fx": torch.fx.symbolic_trace,
    "part scripted": lambda net: nn.Sequential(nn.Linear(64, 64), torch.jit.script(net)),
    "traced": lambda net: torch.jit.trace(net, torch.randn(4, 64), check_trace=False),
    "scripted": torch.jit.script,
}


@program()
def scripted_modules(DDP, record):
    """Modules that torch.fx or torch.jit has traced, with a scripted part, or scripted.

    Stock: as any other module. With BatchNorm, whose buffers TorchScript keeps.
    """
    for title, convert in WAYS.items():
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            ddp = DDP(convert(plain))
        for step, _ in enumerate(steps(ddp, 12, 8, 64)):
            record.model(f"{title}, step {step}", ddp.module)


class Trainer:
    def __init__(self, ddp: nn.Module) -> None:
        self.ddp = ddp
        ddp.trainer = self  # type: ignore[assignment]


@program()
def rewrapped_with_views(DDP, record):
    """A net with gradients as views is wrapped anew, in another module.

    The old wrapper lies in a reference cycle: a trainer holds it and is held by it. Stock: works.
    """
    net = nn.Linear(16, 16)
    for phase in range(3):
        task = nn.Sequential(net, nn.Linear(16, 2 + phase))
        trainer = Trainer(DDP(task, gradient_as_bucket_view=True))
        for step, _ in enumerate(steps(trainer.ddp, 8, 8, 16)):
            record.model(f"phase {phase}, step {step}", task)


BEFORE_THE_BUCKET = Expected(
    "A hook on an AccumulateGrad node (`grad_fn.next_functions`), put there after wrapping",
    keys=r"^step \d+: |^step [1-9]\d*, ",  # all but what hooks see in the first step
)


@program(expected=BEFORE_THE_BUCKET)
def hooks_on_accumulate_nodes(DDP, record):
    """Hooks of the old kind, on AccumulateGrad nodes, put there after wrapping, clamp ``.grad``.

    Stock: the gradient has been copied into its bucket by then, so they do not change the mean.
    Elsewhere they do, as hooks on the parameter do everywhere.
    """
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    ddp = DDP(net)
    nodes, seen = [], []

    def clamp(param: nn.Parameter) -> None:
        seen.append(param.grad.norm())
        param.grad.clamp_(-1e-4, 1e-4)

    for param in net.parameters():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, param=param: clamp(param))
        nodes.append(node)
    for step, _ in enumerate(steps(ddp, 8, 8, 128)):
        record(f"step {step}, this rank's own norms", torch.stack(seen))
        record.model(f"step {step}", net)
        seen.clear()


OUTSIDE = Expected(
    "`torch.compile` of the wrapper: a parameter gets a use outside of the graph in a later step",
    error=r"gradient of 'layers\.5\.weight' was sent when the compiled backward had made it",
)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@program(expected=OUTSIDE)
def penalty_outside_of_the_graph(DDP, record):
    """``torch.compile(ddp)``, and from step 10 on at times a penalty outside of the graph.

    Stock: works, its hooks wait for the whole gradient.
    """
    ddp = DDP(Tower())
    compiled = torch.compile(ddp, backend="aot_eager")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(16):
        ddp.zero_grad()
        loss = compiled(torch.randn(8, 512, generator=generator)).pow(2).mean()
        if step >= 10 and step % 5 == 0:
            loss = loss + 0.1 * ddp.module.layers[5].weight.pow(2).sum()
        loss.backward()
        record.model(f"step {step}", ddp.module)


BEHIND_ITS_OWN = Expected(
    "A callback at the end of a backward waits for what another rank sends behind its own",
    error=r"Error: rank [023], (?s:.{,600})\brank 1\b",  # of whichever is the first to say so
    timeout=4,
)


@program(expected=BEHIND_ITS_OWN)
def waits_in_a_callback(DDP, record, first=0):
    """Rank 1 waits, in a callback at the end of its backward, for what rank 0 sends behind its
    own.

    Stock: works, since its buckets have been launched by then.
    """
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    ddp = DDP(net)
    others = dist.new_group()
    done = 0

    def forward(x: Tensor) -> Tensor:
        out = ddp(x)
        if rank == 1 and done >= first:
            out.register_hook(lambda gradient: wait_in_the_end())
        elif rank == 0 and done >= first:
            # Rank 1 is in its callback before this backward begins. Were it the last of all ranks,
            # it could take part in the whole exchange before its callback.
            dist.recv(torch.empty(1), src=1, group=others)
            record.waits_in_vain()
        return out

    def wait_in_the_end() -> None:
        Variable._execution_engine.queue_callback(exchange_with_rank_0)

    def exchange_with_rank_0() -> None:
        dist.send(torch.ones(1), dst=0, group=others)
        dist.recv(torch.empty(1), src=0, group=others)

    for _ in steps(ddp, 8, 8, 256, forward=forward):
        if rank == 0 and done >= first:
            dist.send(torch.ones(1), dst=1, group=others)
        done += 1
    record("steps", done)


@program(ranks=4, expected=BEHIND_ITS_OWN)
def waits_in_a_callback_of_shares(DDP, record):
    """Rank 1 of four waits in a callback from step 3 on, where large buckets travel in shares.

    Stock: works, since its buckets have been launched by then.
    """
    waits_in_a_callback(DDP, record, first=3)
