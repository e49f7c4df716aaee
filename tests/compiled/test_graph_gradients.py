"""Gradients of a wrapper that is one graph: accumulated, hooked, penalised, weighted."""

from typing import Any

import pytest
import torch.distributed as dist
from distributed import gather, ranks
from one_graph import (
    OPTIONS,
    batch,
    gradients,
    loss_of,
    one_graph,
    watched,
)
from torch import Tensor
from training import raises_if


@ranks(2, timeout=300)
def test_what_was_accumulated_is_reduced_with_the_next() -> None:
    with one_graph() as net, watched() as left:
        for number in range(0, 8, 2):
            net.ddp.zero_grad(set_to_none=number != 4)
            with net.ddp.no_sync():
                loss_of(net.call(batch(number))).backward()
            loss_of(net.call(batch(number + 1))).backward()
            net.assert_means(number, number + 1)
    assert all(gone == 0 for gone, _ in left)


@ranks(2, timeout=300)
def test_parameters_that_the_loss_uses_too_wait_for_the_end() -> None:
    with one_graph() as net, watched() as left:
        for number in range(4):
            (net.loss(number) + net.penalty).backward()
            net.assert_means(number, penalised=1)
    assert all(0 < gone < of for gone, of in left[1:]), left


@pytest.mark.parametrize("option", ["views", "hook", "finite"])
@ranks(2, timeout=300)
def test_a_penalty_that_comes_later_is_an_error_once_and_no_rank_takes_the_step(
    option: str,
) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    with one_graph(**OPTIONS.get(option, {})) as net:
        if option == "hook":
            net.ddp.register_comm_hook(None, allreduce_hook)
        is_first = dist.get_rank() == 0
        for number in range(8):
            loss = net.loss(number)
            if number >= 4 and is_first:
                loss = loss + net.penalty
            if number != 4:
                loss.backward()
                net.assert_means(number, penalised=0.5 * (number > 4))
                continue
            error: Any = raises_if(is_first, RuntimeError, r"rank 0, step 5: .*layers\.1\.weight")
            if option == "finite":
                error = pytest.raises(FloatingPointError, match="on rank 0")
            with error:
                loss.backward()
            broken = [name for name, grad in gradients(net.ddp).items() if grad.isnan().all()]
            assert gather(broken) == [["layers.0.weight", "layers.0.bias"]] * 2


@ranks(2, timeout=300)
def test_a_hook_that_looks_at_gradients_for_one_step_holds_up_that_step_only() -> None:
    kept: list[Tensor] = []
    with one_graph() as net, watched() as left:
        for number in range(5):
            loss = net.loss(number)
            hooked = net.ddp.parameters() if number == 2 else ()
            handles = [param.register_hook(kept.append) for param in hooked]
            loss.backward()
            for handle in handles:
                handle.remove()
            kept.clear()
            net.assert_means(number)
    (_, of), *_ = left
    assert [gone for gone, _ in left] == [0, of, 0, of, of]
