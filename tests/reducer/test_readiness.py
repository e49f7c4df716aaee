"""Buckets are launched as they fill. Gradients of inner backwards are waited for or found."""

from collections.abc import Callable

import pytest
import torch
from differential.named.models import Branches, batch, branch
from distributed import in_rings, ranks, recorded_collectives
from modules import Layers
from oracle import Net, in_step, one_per_rank
from torch.utils.checkpoint import checkpoint
from training import wrap


@ranks(2, views=True)
def test_buckets_are_launched_as_they_fill_while_the_backward_goes_on(view: bool) -> None:
    model = Layers("abcdef", bias=False)
    ddp = in_rings(model, bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    for _ in range(2):
        ddp(torch.randn(2, 4)).sum().backward()
    launched = []
    with recorded_collectives() as calls:
        for name in "abcdef":  # the hook runs just before the gradient is accumulated
            model.layers[name].weight.register_hook(lambda _: launched.append(len(calls)))
        for order, expected in (
            ("abcdef", [0, 1, 2, 3, 4, 5]),
            # The first two buckets are empty: they are launched after the first gradient.
            ("abcd", [0, 3, 4, 5]),
            ("fedcba", [0] * 6),  # all wait for the first bucket
        ):
            launched.clear()
            calls.clear()
            ddp(torch.randn(2, 4), order).sum().backward()
            assert launched == expected, (order, launched)
        assert len(calls) == 6


# Inner backwards, whose parameters autograd does not announce


def checkpoint_behind(net: Net, rank: int) -> None:
    output = net(batch(), "ab")
    (output + checkpoint(branch(net, "c"), output, use_reentrant=True)).sum().backward()


def checkpoint_in_front(net: Net, rank: int) -> None:
    net(checkpoint(branch(net, "c"), batch(), use_reentrant=True), "ab").sum().backward()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        pytest.param(checkpoint_behind, None, id="in time"),
        pytest.param(
            checkpoint_in_front, r"rank \d.*'branches.c.*use_reentrant=False", id="late: an error"
        ),
    ],
)
@pytest.mark.quick
@ranks(2, views=True)
def test_reentrant_checkpoint_that_is_new_in_the_second_step_is_waited_for_from_then_on(
    rank: int, step: Callable[[Net, int], None], error: str | None, view: bool
) -> None:
    ddp = wrap(Branches().double(), view, bucket_cap_mb=1e-6)
    alone = one_per_rank(ddp.module)
    ddp(batch(), "ab").sum().backward()
    if error is not None:
        with pytest.raises(RuntimeError, match=error):
            step(ddp, rank)
    for number in range(3):
        for net in (ddp, *alone):
            net.zero_grad()
        in_step(step, ddp, alone, number)
