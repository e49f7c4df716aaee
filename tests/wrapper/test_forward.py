"""The parts of a forward, and subclasses that define their own forward."""

import copy
from typing import Any

import pytest
import torch
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from modules import Two, normed
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _BufferCommHookLocation
from training import assert_gradients_alike, assert_mean_of, drawn, gradients

from tritonddp import DistributedDataParallel


@ranks(2)
def test_a_module_in_tiny_buckets_can_be_compiled() -> None:
    """dynamo splits graphs by the size of buckets, and asserts that it is at least a MiB."""
    model = torch.compile(Two(), backend="eager")
    net: Any = DistributedDataParallel(model, bucket_cap_mb=0.5)
    net(drawn(4, 3)).sum().backward()
    assert_gradients_alike(net)
    torch.compiler.reset()
    with pytest.raises(AssertionError, match="First bucket should be smaller"):
        Stock(model, bucket_cap_mb=0.5)(drawn(4, 3))
    assert Stock._active_ddp_module is None


@ranks(2)
def test_the_parts_of_a_forward_may_be_called_one_by_one(rank: int) -> None:
    """As in torch's ``replicate``."""
    net = DistributedDataParallel(Two())
    inputs, kwargs = net._pre_forward(drawn(4, 3), both=True)
    with net._inside_ddp_forward():
        output = net.module(*inputs, **kwargs)
    assert net._post_forward(output) is output
    output.sum().backward()
    assert_gradients_alike(net)
    assert net._lazy_init_ran
    x = drawn(4, 3)
    (moved,), (keywords,) = net.to_kwargs((x,), {"a": [x]}, 0)
    assert_same_bits([moved[0], *keywords["a"]], [x, x])


class Trains(Two):
    """A module with a method for training, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def train_step(self, x: Tensor) -> Tensor:
        self.began = self.seen.clone()
        self.seen += x.sum()
        return super().forward(x).sum()


class RunsAnotherMethod(DistributedDataParallel):
    """As in OpenMMLab, for calls of the wrapper."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module.train_step(*inputs, **kwargs)


class HasAnotherForward(DistributedDataParallel):
    """As in OpenMMLab's ``train_step``, with code that other projects have copied from torch."""

    def train_step(self, x: Tensor) -> Tensor:
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.set_runtime_stats_and_log()
            self.reducer.prepare_for_forward()
        if self.reducer._rebuild_buckets():
            raise AssertionError("buckets are rebuilt elsewhere")
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        loss = self.module.train_step(x)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare_for_backward([])
        else:
            self.require_forward_param_sync = False
        return loss

    __call__ = train_step


@pytest.mark.parametrize("location", [None, *_BufferCommHookLocation])
@pytest.mark.parametrize("kind", [RunsAnotherMethod, HasAnotherForward])
@ranks(2)
def test_a_subclass_may_define_its_own_forward(rank: int, kind: Any, location: Any) -> None:
    module = Trains()
    alone = copy.deepcopy(module)
    net = kind(module)
    if location is not None:
        net._register_buffer_comm_hook(
            None, lambda state, buffers: net._default_broadcast_coalesced(), location
        )
    for _ in range(3):
        x = drawn(4, 3)
        net.zero_grad()
        alone.zero_grad()
        net(x).backward()
        alone.train_step(x).backward()
        assert_mean_of(net, alone)
        assert_same_on_all_ranks([module.began])
    is_last = location is _BufferCommHookLocation.POST_FORWARD
    assert net._check_sync_bufs_post_fwd() is is_last
    assert net._check_sync_bufs_pre_fwd() is not is_last
    assert (module.seen == gather(module.seen)[0]).item() is (is_last or rank == 0)


class HasStocksForward(DistributedDataParallel):
    """As in projects that have copied the forward of torch."""

    forward = Stock.forward


class HasAllOfStocksForward(HasStocksForward):
    """As in projects that have copied the functions that it calls, too."""

    _pre_forward = Stock._pre_forward
    _post_forward = Stock._post_forward


@pytest.mark.parametrize("kind", [HasStocksForward, HasAllOfStocksForward])
@ranks(2)
def test_a_subclass_may_copy_the_forward_of_stock(kind: Any) -> None:
    module = normed(3, 3)
    ours, theirs = DistributedDataParallel(copy.deepcopy(module)), kind(module)
    for _ in range(3):
        x = drawn(4, 3)
        for net in ours, theirs:
            net.zero_grad()
            with net.no_sync():
                net(x).square().sum().backward()
            net(x).square().sum().backward()
        assert_same_bits(gradients(theirs), gradients(ours))
        assert_same_bits(theirs.module[1].running_mean, ours.module[1].running_mean)


@ranks(2)
def test_a_copy_of_all_of_it_cannot_be_joined_and_is_told_what_to_call() -> None:
    net, other = HasAllOfStocksForward(nn.Linear(3, 3)), DistributedDataParallel(nn.Linear(3, 3))
    with Join([other, net]):
        other(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"call self\._pre_forward"):
            net(torch.ones(2, 3))
