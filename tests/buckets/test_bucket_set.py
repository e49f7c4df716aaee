"""Buckets are sent in their order, an all-reduce each; gradients are views of them, or are not."""

import pytest
import torch
from distributed import in_rings, ranks, recorded_collectives
from modules import Squares, mlp
from torch import nn
from training import counted, drawn, filled, train_step, wrap

from tritonddp.coordination.agreement import BYTES as HEADER_BYTES
from tritonddp.coordination.counters import Counters


@ranks(2, views=True)
def test_several_buckets_one_all_reduce_each_in_launch_order(view: bool) -> None:
    model = nn.ModuleList([Squares(*[64] * 100), Squares(*[32] * 50, dtype=torch.float64)])
    model.forward = lambda: model[0]() + model[1]()  # type: ignore[method-assign]
    ddp = in_rings(model, bucket_cap_mb=10 / 1024, gradient_as_bucket_view=view)
    for _ in range(2):
        train_step(ddp)
    buckets = ddp.reducer.buckets
    assert len(buckets) == 3 + 2  # 25,600 and 12,800 bytes
    headers = 2 * HEADER_BYTES * buckets[0].params[0].element_size()  # an element a byte and rank
    nbytes = 4 * (64 + 1) * 100 + 8 * (32 + 1) * 50 + headers
    with recorded_collectives() as calls, counted(ddp) as found:
        for _ in range(3):
            train_step(ddp)
    tensors = [tensor for _, tensor in calls]
    assert [t.data_ptr() for t in tensors] == [b.flat.data.data_ptr() for b in buckets] * 3
    assert [t.dtype for t in tensors] == [b.params[0].dtype for b in buckets] * 3
    assert sum(t.nbytes for t in tensors) == 3 * nbytes
    assert calls.names == ["all_reduce"] * 15
    assert calls.on_the_group == 15
    assert found == Counters(
        reductions=3,
        flattens=15,
        unflattens=0 if view else 15,
        collectives=15,
        wire_bytes=3 * nbytes,
        sent_bytes=3 * nbytes,
    )


@ranks(2)
def test_views_alias_the_buckets_and_copies_do_not() -> None:
    for view in (True, False):
        ddp = wrap(mlp(8, 32, 32, 3), view)
        for number in range(3):
            train_step(ddp, drawn(4, 8, step=number))
            storages = {
                bucket.flat.data.untyped_storage().data_ptr() for bucket in ddp.reducer.buckets
            }
            for param in ddp.parameters():
                assert (param.grad.untyped_storage().data_ptr() in storages) is view


@ranks(2)
def test_views_may_move_when_the_module_is_shared(rank: int) -> None:
    """``share_memory()`` gives gradients new memory, and with them what the ranks say of them."""
    ddp = wrap(nn.Linear(64, 64), view=True)
    inputs = filled(2, 64)
    for _ in range(12):
        ddp.zero_grad(set_to_none=False)
        ddp(inputs).sum().backward()
    ddp.module.share_memory()
    outputs = ddp(inputs).sum()
    outputs.backward(retain_graph=True)
    ddp.zero_grad(set_to_none=False)
    if rank == 0:
        outputs = ddp(inputs).sum()
    with pytest.raises(RuntimeError, match="different places of their programs"):
        outputs.backward()
