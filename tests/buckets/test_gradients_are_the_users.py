"""``.grad`` and its hooks, compared with stock DDP."""

from typing import Any

import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from training import WAYS, beside_stock, drawn, gradients, train_step

SIZE = 10_000  # elements of a gradient that is large


class Vectors(nn.Module):
    """Four large vectors, into whose gradients the ranks of a host sum directly."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(SIZE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(vector * vector * x).sum() for vector in self.vectors]).sum()


def step(model: nn.Module, number: int) -> None:
    train_step(model, drawn(SIZE, step=number), loss=torch.sum)


@ranks(2)
def test_hooks_on_accumulate_grad_nodes_change_the_mean() -> None:
    """Under stock DDP they run after the copy into the bucket, which overwrites their changes."""
    ours, stock = beside_stock(Vectors())
    nodes = []
    for model in (ours, stock):
        for param in model.parameters():
            node = param.expand_as(param).grad_fn.next_functions[0][0]

            def halve(*_: Any, param: Tensor = param) -> None:
                param.grad.mul_(0.5)

            node.register_hook(halve)
            nodes.append(node)
    for number in range(4):
        step(ours, number)
        step(stock, number)
        halves = [grad / 2 for grad in gradients(stock)]
        assert_same_bits(gradients(ours), halves, f"gradients in step {number}")


@ranks(2)
def test_gradients_may_be_lazily_negated_also_by_a_communication_hook(rank: int) -> None:
    def negate(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch._neg_view(bucket.buffer()))
        return future

    ours, stock = beside_stock(nn.Linear(4, 3))
    for hook in (None, negate):
        for net in (ours, stock):
            if hook is not None:
                net.register_comm_hook(None, hook)
            for param in net.parameters():
                param.grad = torch._neg_view(torch.full(param.shape, 2.0 + rank))
            net(drawn(5, 4)).sum().backward()
        assert_same_bits(gradients(ours), gradients(stock), f"gradients with {hook}")


@ranks(2)
def test_a_bucket_view_is_not_a_view_for_autograd() -> None:
    """Stock DDP's are views for autograd: they share a version and refuse ``detach_()``."""
    ours, _ = beside_stock(Vectors(), gradient_as_bucket_view=True)
    for number in range(2):
        step(ours, number)
    first, second = ours.module.vectors[0].grad, ours.module.vectors[1].grad
    assert not first._is_view()
    first.detach_()
    version = second._version
    first.zero_()
    assert second._version == version


@ranks(2)
def test_a_hook_reads_the_local_gradient_in_the_bucket_view_of_another_parameter() -> None:
    """Under stock DDP that gradient is already divided by the number of ranks."""
    nets = beside_stock(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), **WAYS["views"])
    seen: list[Tensor] = []
    for net in nets:
        first, last = net.module[0].bias, net.module[1].weight
        first.register_hook(lambda _, last=last: seen.append(last.grad.clone()))
        net(drawn(4, 3)).sum().backward()
    ours, stock = seen
    assert_same_bits(ours, 2 * stock)


@ranks(2)
def test_nothing_is_written_to_the_buffer_of_large_gradients() -> None:
    """So the operating system does not need to allocate its pages."""
    ours, stock = beside_stock(Vectors())
    step(ours, 0)
    for bucket in ours.reducer.buckets:
        bucket.flat.payload.fill_(7)
    for number in range(1, 4):
        step(ours, number)
        step(stock, number)
        assert_same_bits(gradients(ours), gradients(stock), f"gradients in step {number}")
    assert all((bucket.flat.payload == 7).all() for bucket in ours.reducer.buckets)


@ranks(2)
def test_bucket_views_return_to_the_bucket_after_their_data_was_set() -> None:
    ours, stock = beside_stock(nn.Linear(4, 3), **WAYS["views"])
    for number in range(4):
        for net in (ours, stock):
            net.zero_grad(set_to_none=number % 2 == 0)
            net(drawn(5, 4, step=number)).sum().backward()
        assert_same_bits(gradients(ours), gradients(stock), f"gradients in step {number}")
        for param in ours.parameters():
            param.grad.data = param.grad.data * 2
