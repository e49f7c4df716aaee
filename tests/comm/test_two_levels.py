"""Ranks of a host sum in the memory that they share, and hosts exchange their sums on the wire.

``Twin`` is the whole exchange in plain torch: all ranks in one process, parameter by parameter.
"""

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks, run_ranks
from modules import Squares, linears
from on_hosts import on_hosts
from oracle import mean_over_ranks, one_per_rank, play, seed
from torch import Tensor, nn
from training import (
    assert_gradients_alike,
    breaking_off,
    counted,
    descend,
    drawn,
    gradients,
    left_of,
    train_step,
)

from tritonddp import DistributedDataParallel, Int8
from tritonddp.comm.host.memory_exchange import MemoryExchange
from tritonddp.coordination.host import connect

BLOCK, LIMIT, SCALE_BITS = 256, 127.0, ~0xFF
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"compression": "int8"},
    "no feedback": {"compression": Int8(error_feedback=False)},
    "sums": {"compression": Int8(error_feedback="sums")},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "fp16": {"reduce_dtype": torch.float16},
}
INT8 = pytest.param("int8", marks=pytest.mark.quick)
CASES = [INT8, *(each for each in OPTIONS if each != "int8")]


class Net(nn.Module):
    """Quantized and exact parameters; not all are used, and gradients come in another order."""

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


class InOrder(nn.Module):
    """Gradients come in the order of the first buckets, which are not built anew for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(50, 60, 40)

    def forward(self, rank: int, step: int = 0) -> Tensor:
        return self.layers(torch.randn(8, 50)).square().mean()


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
    """By parameter: the local rank that quantizes each of its blocks."""
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
        feedback: the ``error_feedback`` of ``Int8``.
    """

    def __init__(
        self,
        module: nn.Module,
        hosts: int,
        per_host: int,
        wire: torch.dtype,
        feedback: bool | str = True,
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
                if self.feedback is not True:  # of sums that moved: in the next gradient
                    mine = torch.zeros_like(mine)
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
        messages = []
        for host, values in enumerate(sums):
            silent = ~values.any(1)
            residual = self.of_host[host][name] if self.feedback is True else None
            if residual is not None:  # that of a block of zeros waits
                values = values + residual.masked_fill(silent[:, None], 0)
            messages.append(encoded(values, silent, residual))
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
        feedback = getattr(OPTIONS[options].get("compression"), "error_feedback", True)
        twin = Twin(module, hosts, per_host, wire, feedback)

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


@pytest.mark.parametrize("options", CASES)
@ranks(4)
def test_two_hosts_of_two_ranks_have_the_bits_of_the_twin(options: str) -> None:
    beside_the_twin(options, 2, 2, steps=5)


@pytest.mark.parametrize(
    ("hosts", "options"),
    [pytest.param(3, "int8", marks=pytest.mark.quick), (2, "int8")]
    + [(hosts, each) for hosts in (2, 3) for each in OPTIONS if each != "int8"],
)
@ranks(6)
def test_six_ranks_have_the_bits_of_the_twin(hosts: int, options: str) -> None:
    beside_the_twin(options, hosts, 6 // hosts, steps=5)


@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param("large", "int8", marks=pytest.mark.quick),
        pytest.param("bf16 model, views", "int8", marks=pytest.mark.quick),
        *[(how, "int8") for how in ("views", "bf16 model", "one bucket")],
        *[(how, "bf16") for how in ("views", "large", "bf16 model", "one bucket")],
    ],
)
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


# Nothing is lost


def ledger_of(ddp: Any, alone: Sequence[Any], due: dict[str, Tensor], weight: float = 1.0) -> None:
    """Add what the gradients of this step lack of the true means, times the ``weight``."""
    for (name, param), mean in zip(
        ddp.module.named_parameters(), mean_over_ranks(alone), strict=True
    ):
        if mean is not None:
            off = mean.double() - param.grad.double()
            due[name] = due.get(name, 0) + off * weight
    for each in alone:
        each.windows.clear()


def assert_is_left(ddp: Any, due: dict[str, Tensor], unit: float | None = 1.0) -> None:
    """What the gradients lack so far is what the ranks have left out."""
    kept: dict[str, Tensor] = {}
    for state in gather(ddp.comm_state_dict()):
        for tensors in (state["sent"], state["reduced"]):
            for name, tensor in tensors.items():
                # Without weights the unit is that of means.
                tensor = tensor.double() * (unit or state["weight_unit"] * dist.get_world_size())
                kept[name] = kept.get(name, 0) + tensor
    largest = max(float(each.abs().max()) for each in due.values())
    assert largest > 1e-6, "nothing to prove"
    for name, each in due.items():
        assert (each - kept.get(name, 0)).abs().max() < 1e-3 * largest, name


@pytest.mark.parametrize("how", ["copies", "views", "lazy", "check_finite", "weighted"])
@ranks(4, 6)
def test_nothing_is_lost_of_unused_parameters_and_windows(how: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "views": {"gradient_as_bucket_view": True},
        "lazy": {"lazy_bucket_allocation": True},  # stays in one level
        "check_finite": {"check_finite": "warn"},
    }
    with on_hosts(2):
        module = Net()
        alone = one_per_rank(module)
        ddp = wrapped(module, compression="int8", **options.get(how, {}))
        due: dict[str, Tensor] = {}

        def train(net: Any, rank: int) -> None:
            net.zero_grad()
            with net.weighted(items(rank)) if how == "weighted" else contextlib.nullcontext():
                if step == 2 and how != "weighted":
                    with net.no_sync():
                        net(rank, step).backward()
                net(rank, step).backward()

        def items(rank: int) -> int:
            return (3 + 5 * rank) * (1 + 7 * step)

        for step in range(6):
            play(train, ddp, alone, step)
            total = sum(map(items, range(dist.get_world_size())))
            ledger_of(ddp, alone, due, total if how == "weighted" else 1.0)
            assert_gradients_alike(ddp, f"step {step}")
        assert_is_left(ddp, due, None if how == "weighted" else 1.0)
        assert is_in_two_levels(ddp) == (how != "lazy")


@ranks(4, 6)
def test_nothing_is_lost_when_parameters_come_and_shares_move() -> None:
    with on_hosts(2):
        module = linears(64, 64, 64, 64)
        ddp = wrapped(module, compression="int8", bucket_cap_mb=0.02)
        due: dict[str, Tensor] = {}

        def train(net: Any, _: int) -> None:
            net.zero_grad()
            net(torch.randn(8, 64)).square().mean().backward()

        waits = []
        for step in range(7):
            if step == 3:
                torch.manual_seed(7)
                module.append(nn.Linear(64, 64))
            alone = one_per_rank(module)
            play(train, ddp, alone, step)
            ledger_of(ddp, alone, due)
            assert_gradients_alike(ddp, f"step {step}")
            assert_is_left(ddp, due)
            found = [b.quantization for b in ddp._ddp_state.core.manager.current.buckets]
            waits.append(any(each.unsent for each in found if each is not None))
        assert waits[0], "blocks that other ranks of the host quantize now"
        assert not waits[-1]


@ranks(4)
def test_a_block_that_is_not_finite_is_nan_on_all_ranks_and_keeps_what_waits(rank: int) -> None:
    with on_hosts(2):
        module = nn.Linear(64, 64, bias=False)
        ddp = wrapped(module, compression="int8")
        for step in range(4):
            before = ddp.comm_state_dict()["sent"]
            factor = torch.ones(64)
            if step in (1, 2) and rank == 1:
                factor[10] = torch.nan
            ddp.zero_grad()
            (ddp(drawn(8, 64, step=step)) * factor).square().mean().backward()
            assert_gradients_alike(ddp, f"step {step}")
            rows = module.weight.grad.isnan().any(1).nonzero().flatten().tolist()
            # A block has four rows.
            assert rows == ([8, 9, 10, 11] if step in (1, 2) else []), f"step {step}"
            after = ddp.comm_state_dict()["sent"]["weight"]
            assert after.isfinite().all()
            if step in (1, 2) and rank == 1:
                kept, waited = after[8:12], before["weight"][8:12]
                assert waited.any()
                assert_same_bits([kept], [waited], "what waits")


# Which buckets go that way, and how many bytes


@pytest.mark.parametrize("options", OPTIONS)
@ranks(3)
def test_hosts_of_unequal_numbers_stay_in_one_level(rank: int, options: str) -> None:
    found = []
    for transport in ("auto", "process_group"):
        with mock.patch.object(connect, "_host", return_value=f"host {rank // 2}"):
            torch.manual_seed(0)
            group = dist.new_group()
            ddp = wrapped(Net(), process_group=group, transport=transport, **OPTIONS[options])
            for step in range(4):
                ddp.zero_grad()
                seed(rank, step)
                ddp(rank, step).backward()
                found.append(gradients(ddp))
        assert not any(
            isinstance(each.exchange, MemoryExchange) or each.wire.flat_dtype is not each.flat.dtype
            for each in ddp._ddp_state.core.manager.current.buckets
        )
    assert_same_bits(found[4:], found[:4], "through the process group alone")


@pytest.mark.parametrize("options", [*OPTIONS, "fp32"])
@pytest.mark.parametrize(("world", "per_host"), [(4, 2), (6, 2), (6, 3)])
def test_bytes_of_a_host(world: int, per_host: int, options: str) -> None:
    run_ranks(_bytes_of_a_host, world, per_host, options)


def _bytes_of_a_host(per_host: int, options: str) -> None:
    """``2 (H - 1) / H`` of the bytes of the wire, for any number of ranks a host."""
    hosts, width, layers = dist.get_world_size() // per_host, 512, 3
    with on_hosts(per_host):
        module = linears(*[width] * (layers + 1), bias=False)
        ddp = DistributedDataParallel(module, **OPTIONS.get(options, {}))
        for _ in range(3):
            ddp(torch.randn(2, width)).square().mean().backward()
        with counted(ddp) as found:
            ddp(torch.randn(2, width)).square().mean().backward()
    assert found.collectives == len(ddp.reducer.buckets)
    sent = gather(found.sent_bytes)
    numel = layers * width * width
    size = {"fp32": 4, "bf16": 2, "fp16": 2}.get(options, 1 + 4 / BLOCK)
    expected = 2 * (hosts - 1) / hosts * size * numel
    for host in range(hosts):
        of_host = sum(sent[host * per_host : (host + 1) * per_host])
        # (Flags, headers and padding, and parts that are not all as long.)
        assert expected <= of_host < 1.02 * expected, (of_host, expected)


@pytest.mark.parametrize("options", [*CASES, "fp32"])
@ranks(6)
def test_a_rank_may_have_an_empty_share(options: str) -> None:
    with on_hosts(6 if options == "fp32" else 3):
        for module in (nn.Linear(32, 32), Squares(3, 5)):
            ddp = wrapped(module, **OPTIONS.get(options, {}))
            for step in range(3):
                inputs = drawn(8, 32, step=step) if isinstance(module, nn.Linear) else 1.0
                train_step(ddp, inputs)
                assert_gradients_alike(ddp, f"step {step}")


@ranks(4)
def test_a_communication_hook_gets_reduce_dtype_though_buckets_had_moved() -> None:
    seen = []

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().dtype)
        work = dist.all_reduce(bucket.buffer().div_(4), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    with on_hosts(2):
        ddp = wrapped(linears(50, 60, 40), reduce_dtype=torch.bfloat16)
        for step in range(4):
            train_step(ddp, drawn(8, 50, step=step))
            if step == 1:
                assert is_in_two_levels(ddp)
                ddp.register_comm_hook(None, hook)
            assert_gradients_alike(ddp, f"step {step}")
    assert set(seen) == {torch.bfloat16}


@ranks(4)
def test_a_backward_that_breaks_off_on_one_rank_leaves_nan_to_none_but_its_step(rank: int) -> None:
    with on_hosts(2):
        ddp = wrapped(Net(), compression="int8")
        for step in range(6):
            ddp.zero_grad()
            seed(rank, step)
            with breaking_off(ddp.module.middle.weight, step == 3 and rank == 1):
                ddp(rank, step).backward()
            if step != 3:
                assert_gradients_alike(ddp, f"step {step}")
                assert all(each is None or each.isfinite().all() for each in gradients(ddp))
            sent = ddp.comm_state_dict()["sent"].values()
            assert all(each.isfinite().all() for each in sent)


@pytest.mark.parametrize("options", [INT8, "bf16"])
@pytest.mark.parametrize("odd", [(1,), (2, 3)])
@ranks(4)
def test_one_more_backward_on_some_ranks_is_an_error_on_all(
    rank: int, odd: tuple[int, ...], options: str
) -> None:
    with on_hosts(2):
        ddp = wrapped(Net(), **OPTIONS[options])

        def loss_of(step: int) -> Tensor:
            ddp.zero_grad()
            seed(rank, step)
            return ddp(rank, step)

        for step in range(2):
            loss_of(step).backward()
        loss = loss_of(2)
        loss.backward(retain_graph=True)
        if rank not in odd:
            loss = loss_of(3)
        with pytest.raises(RuntimeError, match=rf"rank {odd[-1]}: one more backward"):
            loss.backward()
        for step in range(4, 6):
            loss_of(step).backward()
            assert_gradients_alike(ddp, f"step {step}")
        assert all(each is None or each.isfinite().all() for each in gradients(ddp))


@pytest.mark.parametrize("options", [INT8, "bf16"])
@ranks(4)
def test_a_host_that_reduces_another_module_is_an_error_on_all_ranks(
    rank: int, options: str
) -> None:
    """One with buckets of the same sizes: else gloo ends a process."""
    with on_hosts(2):
        pair = [wrapped(Net(), **OPTIONS[options]) for _ in range(2)]

        def train(ddp: Any, step: int) -> None:
            ddp.zero_grad()
            seed(rank, step)
            ddp(rank, step).backward()

        for step in range(3):
            for ddp in pair:
                train(ddp, step)
        for ddp in pair if rank < 2 else pair[::-1]:
            with pytest.raises(RuntimeError, match="'number 0 in its process group"):
                train(ddp, 3)
        for step in range(4, 6):
            for ddp in pair:
                train(ddp, step)
                assert_gradients_alike(ddp, f"step {step}")
                assert all(each is None or each.isfinite().all() for each in gradients(ddp))


@pytest.mark.parametrize("options", [INT8, "bf16"])
@ranks(4)
def test_ranks_with_fewer_inputs_inside_join(rank: int, options: str) -> None:
    """What is left out of earlier steps is sent, also where a rank only follows the others."""
    with on_hosts(2):
        module = Net()
        alone = one_per_rank(module)
        ddp = wrapped(module, **OPTIONS[options])
        with ddp.join():
            for step in range(3 + rank):
                ddp.zero_grad()
                for other, net in enumerate(alone):
                    net.zero_grad()
                    seed(other, step)
                    if step < 3 + other:
                        net(other, step).backward()
                seed(rank, step)
                ddp(rank, step).backward()
                for grad, mean in zip(gradients(ddp), mean_over_ranks(alone), strict=True):
                    if mean is not None:
                        within = 0.05 * float(mean.abs().max()) + 1e-4
                        torch.testing.assert_close(grad, mean, rtol=0, atol=within)


# A run that goes on


def runs(
    make: type[nn.Module], options: dict[str, Any], per_host: int, renews: bool, steps: int
) -> list[list[Tensor]]:
    """Gradients of each step; another wrapper goes on with the state after the third."""
    found = []
    torch.manual_seed(0)
    with on_hosts(per_host):
        ddp = wrapped(make(), process_group=dist.new_group(), **options)
        for step in range(steps):
            if step == 3 and renews:
                state, module = ddp.comm_state_dict(), make()
                module.load_state_dict(ddp.module.state_dict())
                ddp = wrapped(module, process_group=dist.new_group(), **options)
                ddp.load_comm_state_dict(state)
                assert is_in_two_levels(ddp)
            ddp.zero_grad()
            seed(dist.get_rank(), step)
            ddp(dist.get_rank(), step).backward()
            descend(ddp)
            found.append(gradients(ddp))
        assert is_in_two_levels(ddp)
    return found


@pytest.mark.parametrize(
    ("options", "make"),
    [
        pytest.param("int8", Net, marks=pytest.mark.quick),
        pytest.param("int8", InOrder, marks=pytest.mark.quick),
        *[(each, Net) for each in (*OPTIONS, "fp32") if each != "int8"],
    ],
)
@ranks(4)
def test_a_new_wrapper_with_the_state_goes_on_with_the_same_bits(
    options: str, make: type[nn.Module]
) -> None:
    given = OPTIONS.get(options, {})
    expected, found = (runs(make, given, 2, renews, steps=6) for renews in (False, True))
    assert_same_bits(found, expected, "step")


@pytest.mark.parametrize(
    ("before", "after"), [((4, 2), (2, 2)), ((2, 2), (4, 2)), ((4, 2), (4, 4)), ((4, 2), (4, 1))]
)
@ranks(4)
def test_on_other_hosts_all_that_was_left_out_is_still_to_come(
    rank: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Ranks and ranks a host, before and after."""
    states: dict[str, Any] = {}
    made: list[DistributedDataParallel] = []
    saved: list[dict[str, Any]] = []
    for size, per_host in (before, after):
        group = dist.new_group(range(size))
        with on_hosts(per_host):
            if rank < size:
                ddp = wrapped(Net(), compression="int8", process_group=group)
                made.append(ddp)
                if saved:
                    ddp.load_comm_state_dict(*(saved[r] for r in range(rank, before[0], size)))
                    states = ddp.comm_state_dict()
                for step in range(3):
                    seed(rank, step)
                    with ddp.weighted(5.0):
                        ddp(rank, step).backward()
                assert is_in_two_levels(ddp) == (1 < per_host < size)
                if not saved:
                    states = ddp.comm_state_dict()
        if not saved:
            saved = [each for each in gather(states) if each]
            states = {}
    now, expected = left_of([each for each in gather(states) if each]), left_of(saved)
    assert any(tensor.abs().max() > 1e-5 for tensor in expected.values())
    assert expected.keys() == now.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(now[name], tensor, rtol=0, atol=1e-7, msg=name)
