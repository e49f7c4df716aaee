"""When buckets are launched, and errors of unused, late and changed parameters."""

from collections.abc import Callable

import pytest
import torch
from differential.named.models import Branches, batch, branch
from distributed import in_rings, ranks, recorded_collectives
from modules import Layers
from oracle import Net, in_step, one_per_rank
from torch.utils.checkpoint import checkpoint
from training import train_step, wrap


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


# Unused parameters in strict mode, and parameters that change their dtype


def all_branches(net: Net, rank: int) -> None:
    train_step(net, batch(), "abcdef", loss=torch.sum)


@pytest.mark.parametrize("offenders", [[0, 1], [1]], ids=["all ranks", "one rank"])
@ranks(2, views=True)
def test_strict_mode_raises_at_the_next_forward_and_then_goes_on(
    rank: int, offenders: list[int], view: bool
) -> None:
    ddp = wrap(Branches().double(), view, find_unused_parameters=False)
    alone = one_per_rank(ddp.module)
    for step in range(3):
        ddp(batch(), "abcde" if rank in offenders else "abcdef").sum().backward()
        if rank in offenders:
            with pytest.raises(RuntimeError, match="Expected to have finished") as caught:
                ddp(batch(), "abcdef")
            message = str(caught.value)
            unused = [name for name, _ in ddp.module.named_parameters() if ".f." in name]
            for part in [f"rank {rank}", "4 parameters", *unused, "find_unused_parameters=False"]:
                assert part in message, message
            assert "branches.e" not in message
        ddp.zero_grad()
        in_step(all_branches, ddp, alone, step)


@ranks(2, views=True)
def test_a_parameter_that_changes_its_dtype_is_an_error_that_names_it(view: bool) -> None:
    ddp = wrap(Branches().double(), view)
    ddp(batch(), "abcdef").sum().backward()
    ddp.zero_grad()
    ddp.float()
    loss = ddp(batch().float(), "abcdef").sum()
    with pytest.raises(RuntimeError, match=r"'branches\..*float64.* to torch.float32.*[Ww]rap"):
        loss.backward()
