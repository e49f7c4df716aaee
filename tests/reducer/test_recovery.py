"""After a failed backward no gradient is wrong, no rank waits, and the next step is right."""

from typing import Any

import pytest
import torch.distributed as dist
from distributed import ranks
from modules import mlp
from torch import Tensor, nn
from training import assert_right_step, drawn, fail, gradients, raises_if, train_step, wrap


def layers() -> nn.Sequential:
    return mlp(4, 4, 4, 2)


def batch(number: int) -> Tensor:
    return drawn(3, 4, step=number)


def break_off(model: nn.Module, layer: int, ranks_that_fail: list[int]) -> Any:
    """Let the backward fail at the output of ``layer``: later layers have gradients."""

    def on_output(_: Any, __: Any, output: Tensor) -> None:
        if dist.get_rank() in ranks_that_fail:
            output.register_hook(fail)

    return model[layer].register_forward_hook(on_output)


# A hook on the output of the last layer runs before the wrapper notices the backward. So layer 4
# must fail on both ranks.
@pytest.mark.parametrize(("who", "layer"), [([0, 1], 4), ([0], 0), ([0], 2), ([1], 2)])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@ranks(2, views=True)
def test_after_a_backward_that_broke_off_the_next_step_is_right(
    rank: int, who: list[int], layer: int, first: bool, view: bool
) -> None:
    """The other ranks wait for the failed ranks, and get NaN in buckets that were not sent."""
    model = layers()
    ddp = wrap(model, view, bucket_cap_mb=1e-6)
    for number in range(0 if first else 2):
        assert_right_step(ddp, batch(number))
    handle = break_off(model, layer, who)
    failed = rank in who
    with raises_if(failed, ZeroDivisionError):
        # Failed ranks complete this reduction in their next forward.
        train_step(ddp, batch(5))
    handle.remove()
    if not failed:
        mixed = gradients(ddp)
        nan = [bool(grad.isnan().any()) for grad in mixed]
        # In the first step all buckets are sent at the end. Later, the buckets of the layers above
        # the one whose output raised were sent before.
        sent = 0 if first else {0: 4, 2: 2}[layer]
        assert nan == [True] * (6 - sent) + [False] * sent, nan
        train_step(model, batch(5))
        for grad, own in zip(mixed, gradients(model), strict=True):
            assert grad.isnan().any() or grad.ne(own).any(), "a mean of one"
    for number in (6, 7, 8):
        assert_right_step(ddp, batch(number))


@pytest.mark.parametrize("kind", ["sparse", "two rows", "one row"])
@ranks(2, views=True)
def test_a_gradient_of_another_layout_or_shape_is_named(kind: str, view: bool) -> None:
    """On every rank. One row of four could be broadcast, but is an error too."""
    ddp = wrap(layers(), view)
    for number in range(2):
        train_step(ddp, batch(number))

    def change(param: Any) -> None:
        grad, param.grad = param.grad, None
        if kind == "sparse":
            param.grad = grad.to_sparse()
        else:
            rows = 2 if kind == "two rows" else 1
            param.data = param.data[:rows].clone()
            param.grad = grad[:rows].clone()

    ddp.module[2].weight.register_post_accumulate_grad_hook(change)
    name = None if kind == "one row" else r"rank \d.*'2.weight'"
    with pytest.raises(RuntimeError, match=name):
        train_step(ddp, batch(3))
