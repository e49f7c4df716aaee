"""Ranks of a host sum in the memory that they share, and hosts exchange their sums on the wire.

``Twin`` is the whole exchange in plain torch: all ranks in one process, parameter by parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks
from modules import linears
from on_hosts import on_hosts
from oracle import mean_over_ranks, one_per_rank, play
from torch import Tensor, nn
from training import assert_gradients_alike, gradients

from tritonddp import DistributedDataParallel, Int8
from tritonddp.buckets.wire_formats import QuantizedBetweenHosts
from tritonddp.comm.host.memory_exchange import MemoryExchange

BLOCK, LIMIT, SCALE_BITS = 256, 127.0, ~0xFF
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"compression": "int8"},
    "no feedback": {"compression": Int8(error_feedback=False)},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "fp16": {"reduce_dtype": torch.float16},
}


class Net(nn.Module):
    """Quantised and exact parameters; not all are used, and gradients come in another order."""

    def __init__(self, width: int = 60) -> None:
        super().__init__()
        self.last = nn.Linear(40, 3)  # small: exact
        self.middle = nn.Linear(width, 40)
        self.some = nn.Linear(40, 40)  # used by some ranks in some steps
        self.never = nn.Linear(40, 40)
        self.first = nn.Linear(50, width)

    def forward(self, rank: int, step: int = 0) -> Tensor:
        dtype = self.first.weight.dtype
        x = torch.tanh(self.middle(torch.tanh(self.first(torch.randn(8, 50, dtype=dtype)))))
        if (rank, step % 3) in ((0, 0), (3, 1)):
            x = torch.tanh(self.some(x))
        return self.last(x).square().mean()


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.01, "transport": "auto"} | options)


def is_in_two_levels(ddp: DistributedDataParallel) -> bool:
    buckets = ddp._ddp_state.core.manager.current.buckets
    return all(
        isinstance(each.exchange, MemoryExchange) and each.exchange.peers.has_line
        for each in buckets
    )


def is_quantized(param: Tensor) -> bool:
    return param.dim() > 1 and param.numel() >= 1024


def owners(ddp: DistributedDataParallel, per_host: int) -> dict[str, Tensor]:
    """By parameter: the local rank that quantises each of its blocks."""
    found = {}
    for bucket in ddp._ddp_state.core.manager.current.buckets:
        first, share = 0, -(-len(bucket.flat.data) // (per_host * BLOCK))  # in blocks
        for name, param in zip(bucket.names, bucket.params, strict=True):
            blocks = -(-param.numel() // BLOCK)  # each gradient begins one
            found[name] = torch.arange(first, first + blocks) // share
            first += blocks
    return found


def in_blocks(tensor: Tensor) -> Tensor:
    rows = torch.zeros(-(-tensor.numel() // BLOCK), BLOCK)
    rows.view(-1)[: tensor.numel()] = tensor.reshape(-1)
    return rows


def encoded(values: Tensor, kept: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numbers and scales of blocks; the errors go into ``residual``, but for those ``kept``."""
    amax = values.abs().amax(1)
    scale = amax / LIMIT
    scale = (scale.view(torch.int32) & SCALE_BITS).view(torch.float32)
    scale[scale < torch.finfo(torch.float32).tiny] = 0
    broken = ~amax.isfinite()
    numbers = (values / torch.where(scale > 0, scale, 1.0)[:, None]).round()
    numbers[broken], scale[broken] = 0, torch.nan
    if residual is not None:
        ok = ~(kept | broken)
        residual[ok] = (values - numbers * scale[:, None])[ok]
    return numbers, scale


class Twin:
    """What the ranks of several hosts make of their gradients.

    Args:
        hosts: number of hosts.
        per_host: of ranks.
        wire: ``torch.int8``, or the ``reduce_dtype``.
    """

    def __init__(
        self, module: nn.Module, hosts: int, per_host: int, wire: torch.dtype, feedback: bool = True
    ) -> None:
        self.hosts, self.per_host, self.wire, self.feedback = hosts, per_host, wire, feedback
        self.names = [name for name, _ in module.named_parameters()]
        rows = {name: in_blocks(param) * 0 for name, param in module.named_parameters()}
        # What is left out: by host and by rank, and of the sums over hosts.
        self.of_host = [{n: each.clone() for n, each in rows.items()} for _ in range(hosts)]
        self.of_rank = [{n: each.clone() for n, each in rows.items()} for _ in self._ranks]
        self.of_sum = {n: each.clone() for n, each in rows.items()}

    @property
    def _ranks(self) -> range:
        return range(self.hosts * self.per_host)

    def adopt(self, ddp: DistributedDataParallel) -> None:
        """Take over what is left out now: a first step goes through the process group."""
        states, of_blocks = gather(ddp.comm_state_dict()), owners(ddp, self.per_host)
        for rank, state in enumerate(states):
            host, local = divmod(rank, self.per_host)
            for name, tensor in state["sent"].items():
                rows, mine = in_blocks(tensor), of_blocks[name] == local
                self.of_host[host][name][mine] = rows[mine]
                self.of_rank[rank][name] = torch.where(mine[:, None], 0, rows)
            for name, tensor in state["reduced"].items():
                self.of_sum[name] += in_blocks(tensor)

    def reduce(self, alone: Sequence[nn.Module]) -> list[Tensor | None]:
        """The means of the gradients of these models, one a rank."""
        means: list[Tensor | None] = []
        for name, *params in zip(self.names, *(each.parameters() for each in alone), strict=True):
            grads = [param.grad for param in params]
            if all(grad is None for grad in grads):
                means.append(None)
                continue
            shape, dtype = params[0].shape, params[0].dtype
            if self.wire is torch.int8 and not is_quantized(params[0]):
                mean = self._summed(self._of_hosts(name, grads), torch.float32)
            elif self.wire is torch.int8:
                mean = self._quantized(name, self._of_hosts(name, grads))
            else:
                mean = self._summed(self._of_hosts(name, grads), self.wire)
            means.append(mean.view(-1)[: shape.numel()].view(shape).to(dtype))
        return means

    def _of_hosts(self, name: str, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The sum over the ranks of each host, in their order, in blocks."""
        sums: list[Tensor] = []
        scale = 1 / len(grads)
        for rank, grad in enumerate(grads):
            values = self.of_rank[rank][name] * 0
            if grad is not None:
                values = in_blocks(grad.float()) * scale + self.of_rank[rank][name]
                self.of_rank[rank][name].zero_()
            if rank % self.per_host:
                sums[-1] = sums[-1] + values
            else:
                sums.append(values)
        return sums

    def _summed(self, sums: Sequence[Tensor], wire: torch.dtype) -> Tensor:
        total, *others = [each.to(wire).float() for each in sums]
        for other in others:
            total = total + other
        return total if self.hosts == 2 else total.to(wire).float()

    def _quantized(self, name: str, sums: Sequence[Tensor]) -> Tensor:
        none, messages = torch.zeros(len(sums[0]), dtype=torch.bool), []
        for host, values in enumerate(sums):
            residual = self.of_host[host][name] if self.feedback else None
            values = values if residual is None else values + residual
            messages.append(encoded(values, none, residual))
        is_direct = self.hosts == 2
        residual = self.of_sum[name] if self.feedback and not is_direct else None
        total = torch.zeros_like(sums[0]) if residual is None else residual.clone()
        for numbers, scale in messages:
            total = total + numbers * scale[:, None]
        if is_direct:
            return total
        silent = torch.stack([scale == 0 for _, scale in messages]).all(0)
        total[silent] = 0
        numbers, scale = encoded(total, silent, residual)
        return numbers * scale[:, None]


def beside_the_twin(options: str, hosts: int, per_host: int, steps: int, **more: Any) -> None:
    """Steps of :class:`Net` have the bits of the twin."""
    wire = OPTIONS[options].get("reduce_dtype", torch.int8)
    dtype = more.pop("dtype", torch.float32)
    with on_hosts(per_host):
        module = Net(more.pop("width", 60)).to(dtype)
        alone = one_per_rank(module)
        ddp = wrapped(module, **OPTIONS[options], **more)
        twin = Twin(module, hosts, per_host, wire, feedback=options == "int8")

        def train(net: Any, rank: int) -> None:
            net.zero_grad()
            net(rank, step).backward()

        for step in range(steps):
            play(train, ddp, alone, step)
            assert_gradients_alike(ddp, f"step {step}")
            if step == 0:  # through the process group
                if wire is torch.int8:
                    twin.adopt(ddp)
                continue
            assert_same_bits(gradients(ddp), twin.reduce(alone), f"step {step}")
        assert is_in_two_levels(ddp)


@pytest.mark.parametrize("options", OPTIONS)
@ranks(4)
def test_two_hosts_of_two_ranks_have_the_bits_of_the_twin(options: str) -> None:
    beside_the_twin(options, 2, 2, steps=5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("hosts", [2, 3])
@ranks(6)
def test_six_ranks_have_the_bits_of_the_twin(hosts: int, options: str) -> None:
    beside_the_twin(options, hosts, 6 // hosts, steps=5)


@pytest.mark.parametrize("options", ["int8", "bf16"])
@pytest.mark.parametrize("how", ["views", "large", "bf16 model", "bf16 model, views", "one bucket"])
@ranks(4)
def test_gradients_of_all_kinds_have_the_bits_of_the_twin(how: str, options: str) -> None:
    more: dict[str, dict[str, Any]] = {
        "views": {"gradient_as_bucket_view": True},
        "large": {"width": 700},
        "bf16 model": {"dtype": torch.bfloat16},
        "bf16 model, views": {"dtype": torch.bfloat16, "gradient_as_bucket_view": True},
        "one bucket": {"bucket_cap_mb": 25},
    }
    beside_the_twin(options, 2, 2, steps=4, **more[how])
