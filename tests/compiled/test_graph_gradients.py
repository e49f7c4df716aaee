"""Gradients of a wrapper that is one graph: accumulated, hooked, penalised, weighted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from one_graph import (
    OPTIONS,
    SMALL,
    Layers,
    batch,
    fresh_dynamo,
    gradients,
    loss_of,
    one_graph,
    seeded,
    watched,
)
from training import raises_if

from tritonddp import DistributedDataParallel


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
def test_a_hook_behind_all_parameters_may_finalize_the_backward() -> None:
    with one_graph() as net:
        net.ddp.require_manual_backward_finalization = True
        for number in range(5):
            net.ddp.zero_grad()
            inputs = batch(number).requires_grad_()
            if number:  # in the first backward only at its end
                inputs.register_hook(lambda _: net.ddp.finalize_backward())
            loss_of(net.call(inputs * 1)).backward()
            if not number:
                net.ddp.finalize_backward()
            net.assert_means(number)


@ranks(2, timeout=300)
def test_a_hook_that_looks_at_gradients_for_one_step_holds_up_that_step_only() -> None:
    kept: list[Any] = []
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


@ranks(2, timeout=300)
def test_a_parameter_that_one_rank_has_frozen_is_named() -> None:
    with one_graph() as net:
        for number in range(3):
            net.step(number)
        net.ddp.module.layers[1].weight.requires_grad_(dist.get_rank() == 0)
        with pytest.raises(RuntimeError, match=r"layers\.1\.weight"):
            loss_of(net.call(batch(3))).backward()


@ranks(2, timeout=300)
def test_weighted_means() -> None:
    with one_graph() as net:
        for number in range(3):
            net.ddp.zero_grad()
            with net.ddp.weighted(dist.get_rank() + 1):
                loss_of(net.call(batch(number))).backward()
            net.module.zero_grad()
            loss_of(net.module(batch(number))).backward()
            one, two = gather(gradients(net.module))
            net.assert_gradients({name: (one[name] + 2 * two[name]) / 3 for name in one})


@ranks(2, timeout=300)
def test_two_forwards_in_one_graph() -> None:
    with fresh_dynamo():
        net, twin = (DistributedDataParallel(seeded(Layers), **SMALL) for _ in range(2))
        twice = torch.compile(lambda x: net(net(x)), backend="aot_eager", fullgraph=True)
        for number in range(3):
            net.zero_grad()
            twin.zero_grad()
            loss_of(twice(batch(number))).backward()
            loss_of(twin(twin(batch(number)))).backward()
            torch.testing.assert_close(gradients(net), gradients(twin))
