"""Gradients are the user's tensors: held, marked, copied, freed."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from hostile.table import Expected, program


@program()
def aligned_gradients(DDP, record):
    """An optimizer such as SOAP or Shampoo multiplies gradients with each other.

    Stock: each lies at a multiple of 64 bytes, as torch's allocator gives memory. A product of
    matrices that lie elsewhere may have other bits.
    """
    net = nn.Sequential(
        nn.Linear(64, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 10),
    )
    ddp = DDP(net)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        for param in net.parameters():
            param.grad = None
        ddp(torch.randn(16, 64, generator=generator)).pow(2).mean().backward()
        for name, param in net.named_parameters():
            record(f"step {step}, {name} begins at 64 bytes", param.grad.data_ptr() % 64)
            if param.dim() == 2:
                record(f"step {step}, {name}: G G^T", param.grad @ param.grad.T)


@program()
def deepcopied_gradients(DDP, record):
    """Gradients are kept by ``copy.deepcopy``, one by one, and pickled.

    As in PCGrad and federated learning. Stock: a copy costs the bytes of the gradient.
    """
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(19)])  # 5 MB: two buckets
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(8, 256, generator=generator)).pow(2).mean().backward()
        kept = {name: copy.deepcopy(param.grad) for name, param in net.named_parameters()}
        for name, gradient in kept.items():
            record(f"step {step}, {name}", gradient)
            record(f"step {step}, bytes of {name}", gradient.untyped_storage().nbytes())
            is_small = len(pickle.dumps(gradient)) < 2 * gradient.nbytes + 2000
            record(f"step {step}, {name} is small when pickled", is_small)
        optimizer.step()


@program()
def freed_gradients(DDP, record):
    """To save memory a loop frees the storage of each gradient as soon as it has been applied.

    Stock: it is the gradient's alone.
    """
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    ddp = DDP(net)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        ddp.zero_grad()
        ddp(torch.randn(8, 256, generator=generator)).pow(2).mean().backward()
        with torch.no_grad():
            for name, param in net.named_parameters():
                record(f"step {step}, {name}", param.grad)
                param.sub_(param.grad, alpha=0.05)
                param.grad.untyped_storage().resize_(0)
                param.grad = None
        record.model(f"step {step}", net)


WIDTH = 129


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.Parameter(torch.randn(WIDTH, WIDTH // 2 + 1, 2) * 0.1)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.before(x)) * torch.view_as_complex(self.pairs).mean(0)
        return self.after(torch.fft.irfft(spectrum, n=WIDTH)) * self.scale


@program()
def gradients_as_other_types(DDP, record):
    """A Fourier layer keeps complex weights as pairs, and reads their gradients as such.

    A checksum reads gradients as 8-byte words. Stock: each gradient begins where its type may
    begin.
    """
    ddp = DDP(Fourier())
    pairs = ddp.module.pairs
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        ddp.zero_grad()
        ddp(torch.randn(8, WIDTH, generator=generator)).pow(2).mean().backward()
        record(f"step {step}, norm", torch.view_as_complex(pairs.grad).abs().sum())
        record(f"step {step}, checksum", pairs.grad.view(torch.int64).sum())
        with torch.no_grad():
            for param in ddp.parameters():
                param.sub_(param.grad, alpha=0.01)
        record.model(f"step {step}", ddp.module)


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
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        optimizer.zero_grad()
        seen.clear()
        ddp(torch.randn(8, 128, generator=generator)).pow(2).mean().backward()
        record(f"step {step}, this rank's own norms", torch.stack(seen))
        record.model(f"step {step}", net)
        optimizer.step()


@program()
def large_gradients_held(DDP, record):
    """Large gradients, some held by a hook as they come, are looked at after the backward.

    Stock: they are the same tensors with the same memory, which holds nothing else. (The
    buckets of so large gradients may be in memory that ranks share.)
    """
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    ddp = DDP(net)
    held: dict[Tensor, tuple[Tensor, int]] = {}

    def hold(param: Tensor) -> None:
        held[param] = param.grad, param.grad.data_ptr()

    for param in net[:6].parameters():  # the others are held by nobody
        param.register_post_accumulate_grad_hook(hold)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        ddp.zero_grad()
        ddp(torch.randn(8, 512, generator=generator)).pow(2).mean().backward()
        for name, param in net.named_parameters():
            record(f"step {step}, {name}", param.grad)
            record(f"step {step}, bytes of {name}", param.grad.untyped_storage().nbytes())
            record(f"step {step}, {name} begins at 64 bytes", param.grad.data_ptr() % 64)
            if param in held:
                gradient, address = held[param]
                record(f"step {step}, {name} is the same tensor", param.grad is gradient)
                record(f"step {step}, {name} is where it was", param.grad.data_ptr() == address)
                record(f"step {step}, {name} held", gradient)
        held.clear()


class Marked(torch.Tensor):
    pass


@program()
def marked_gradients(DDP, record):
    """A post-accumulate hook marks each gradient with its learning rate; the user's step reads it.

    Another one makes a gradient a tensor of a subclass. Stock: ``.grad`` stays the tensor that
    was marked.
    """
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    ddp = DDP(net)

    def mark(param: Tensor) -> None:
        param.grad.rate = 0.1 if param.dim() == 1 else 0.05

    def make_a_subclass(param: Tensor) -> None:
        param.grad = param.grad.as_subclass(Marked)

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(mark)
    net[2].weight.register_post_accumulate_grad_hook(make_a_subclass)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        ddp.zero_grad()
        ddp(torch.randn(8, 128, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        record(f"step {step}, type", type(net[2].weight.grad).__name__)
        with torch.no_grad():
            for name, param in net.named_parameters():
                rate = getattr(param.grad, "rate", None)
                record(f"step {step}, mark of {name}", rate)
                param.sub_(param.grad, alpha=rate or 0.0)


@program()
def own_end_of_backward(DDP, record):
    """Callbacks at the end of the backward, as FSDP has them, look at gradients.

    One is queued by a hook of the output, one by a hook of the last parameter. Stock: each sees
    what is there when its turn comes.
    """
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen: list[tuple[str, Tensor]] = []

    def look_in_the_end(title: str) -> None:
        Variable._execution_engine.queue_callback(
            lambda: seen.append((title, net[2].weight.grad.norm()))
        )

    net[0].weight.register_post_accumulate_grad_hook(lambda param: look_in_the_end("late"))
    for step in range(20):
        optimizer.zero_grad()
        out = ddp(torch.randn(8, 128, generator=generator))
        out.register_hook(lambda gradient: look_in_the_end("early"))
        seen.clear()
        out.pow(2).mean().backward()
        for title, norm in seen:
            record(f"step {step}, {title}", norm)
        record.model(f"step {step}", net)
        optimizer.step()
