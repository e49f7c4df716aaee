"""Inside join() a forward announces its backward: backwards that do something else."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from distributed import assert_same_bits, ranks
from torch import nn
from training import assert_gradients_alike, gradients, wrap
from uneven import loss_of, net, step_of

from tritonddp import DistributedDataParallel


@ranks(2, views=True)
def test_forwards_without_a_backward_are_completed(rank: int, view: bool) -> None:
    """Before the first reduction, between two, and at the end. Gradients do not change."""
    ddp = wrap(net(), view, bucket_cap_mb=1e-4)
    kept = None
    with ddp.join():
        for step in range(5 if rank else 2):
            if step != 1:
                loss_of(ddp, rank, step)
            step_of(ddp, step)
            kept = gradients(ddp)
            if step == 3:
                loss_of(ddp, rank, step)
        loss_of(ddp, rank, step)
    assert_same_bits(gradients(ddp), kept)
    assert ddp.reducer.counters.reductions == 11, ddp.reducer.counters


@ranks(2)
def test_backwards_that_no_forward_has_announced_are_refused(rank: int) -> None:
    ddp = DistributedDataParallel(net())
    error = "rank ., step 1: this backward inside join.. follows no forward outside no_sync"
    with ddp.join():
        loss = loss_of(ddp, rank, 0)
        with ddp.no_sync():  # as in stock, the place of the forward decides
            loss.backward(retain_graph=True)
        assert_gradients_alike(ddp)
        with pytest.raises(RuntimeError, match=error):
            loss.backward(retain_graph=True)
        with ddp.no_sync():
            loss.backward()
            loss = loss_of(ddp, rank, 1)
        loss.backward()  # local: its forward ran under no_sync
        with pytest.raises(RuntimeError, match=r"reduce_gradients\(\) was called inside join\(\)"):
            ddp.reduce_gradients()
        step_of(ddp, 0)
    assert_gradients_alike(ddp)
    assert ddp.reduce_gradients() is None


def forward_under_no_sync(ddp: DistributedDataParallel, rank: int) -> None:
    for step in range(2 if rank else 1):
        with ddp.no_sync() if (rank, step) == (2, 1) else contextlib.nullcontext():
            loss_of(ddp, rank, step).backward()


def skipped_backward(ddp: DistributedDataParallel, rank: int) -> None:
    for step in range(3):
        loss = loss_of(ddp, rank, step)
        if (rank, step) != (0, 1):
            loss.backward()


def added_parameter(ddp: DistributedDataParallel, rank: int) -> None:
    for step in range(3 if rank else 1):
        if step == 1:
            scale = nn.Parameter(torch.ones(4).double())
            ddp.module.layers[0].register_parameter("scale", scale)
        loss_of(ddp, rank, step).backward()


DIFFERENCES = {
    forward_under_no_sync: "inside join.., ranks must agree on which forwards have a reduced "
    "backward. This forward: rank 0: has no inputs left; rank 1: yes; rank 2: no",
    skipped_backward: "rank 0: nothing, because no backward followed a forward inside join.*; "
    "rank 1: the first backward",
    added_parameter: "(?s)DDP expects same model.*layers.0.scale.*none with this name",
}


@pytest.mark.parametrize("train", DIFFERENCES)
@ranks(3)
def test_ranks_that_differ_are_an_error_on_every_rank(rank: int, train: Callable) -> None:
    ddp = DistributedDataParallel(net())
    with pytest.raises(RuntimeError, match=DIFFERENCES[train]), ddp.join():
        train(ddp, rank)
