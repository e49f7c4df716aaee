"""``skip_all_reduce_unused_params``: buckets without gradients on any rank are not sent."""

import pytest
import torch
from distributed import assert_same_bits, ranks, recorded_collectives
from modules import Layers
from torch import Tensor, nn
from training import filled, gradients, wrap

from tritonddp import DistributedDataParallel


def loss_of(net: nn.Module, layers: str) -> Tensor:
    """A loss of these layers. Each is a bucket, and the last layer is in the first bucket."""
    return net(filled(2, 8), layers).square().sum()


def wrapped(skip: bool, view: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = wrap(
        Layers("abc", 8, bias=False),
        view,
        bucket_cap_mb=1e-4,
        skip_all_reduce_unused_params=skip,
        transport="process_group",
    )
    loss_of(net, "abc").backward()  # decides the order
    # A parameter that is unused for the first time may be used by an inner backward: it is sent.
    for layer in "abc":
        loss_of(net, layer).backward()
    net.zero_grad()
    assert [bucket.names for bucket in net.reducer.buckets] == [
        [f"layers.{name}.weight"] for name in "cba"
    ]
    return net


def steps(net: DistributedDataParallel) -> tuple[list[int], list[Tensor | None]]:
    """The number of messages of each step, and the gradients after it."""
    sent, grads = [], []
    for number, layers in enumerate(["abc", "bc", "c", "ac", "ab", "c", "abc"]):
        if number == 5:  # layer a has a local gradient, and b a stale one
            with net.no_sync():
                loss_of(net, "a").backward()
        with recorded_collectives() as calls:
            loss_of(net, layers).backward()
        sent.append(calls.names.count("all_to_all_single"))
        assert len(calls) == sent[-1]
        grads += gradients(net)
        if number != 4:
            net.zero_grad()
    return sent, grads


@ranks(2, 3, views=True)
def test_the_same_gradients_with_fewer_messages(view: bool) -> None:
    sent, grads = steps(wrapped(skip=True, view=view))
    sent_by_all, expected = steps(wrapped(skip=False, view=view))
    assert sent_by_all == [3] * 7
    # Layer c is in the first bucket, which is always sent.
    assert sent == [3, 2, 1, 2, 3, 2, 3]
    assert_same_bits(grads, expected, "gradient")


@ranks(2)
def test_ranks_that_skip_different_buckets_get_an_error(rank: int) -> None:
    net = wrapped(skip=True)
    layers = ["bc", "ac"][rank]
    skipped = ["layers.a.weight", "layers.b.weight"][rank]
    with pytest.raises(RuntimeError, match=rf"rank \d, step 5.*unused on all ranks.*{skipped}"):
        loss_of(net, layers).backward()
    # Rank 1 skips one more.
    net = wrapped(skip=True)
    layers = ["abc", "bc"][rank]
    with pytest.raises(RuntimeError, match=r"different buckets.*skips: (bucket|none)"):
        loss_of(net, layers).backward()


@ranks(2)
def test_inside_join_all_buckets_are_sent(rank: int) -> None:
    """A rank without inputs cannot know which of them the other ranks skip."""
    ddp = wrapped(skip=True)
    with ddp.join():
        for layers in ("abc", "bc", "c", "ac")[: 4 if rank else 1]:
            ddp.zero_grad()
            loss_of(ddp, layers).backward()
            used = [param.grad is not None for param in ddp.parameters()]
            assert used == [name in layers for name in "abc"]
