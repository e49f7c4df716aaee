"""Gradients of a wrapper that is one graph: accumulated, hooked, penalised, weighted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from one_graph import (
    CLOSE,
    LOOSE,
    OPTIONS,
    SMALL,
    WIDTH,
    Layers,
    Net,
    batch,
    fresh_dynamo,
    gradients,
    gradients_alone,
    loss_of,
    one_graph,
    seeded,
    watched,
)
from torch import Tensor, nn
from training import raises_if

from tritonddp import DistributedDataParallel


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@ranks(2, timeout=300)
def test_what_was_accumulated_is_reduced_with_the_next(view: bool) -> None:
    with one_graph(gradient_as_bucket_view=view) as net, watched() as left:
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


class WithUnused(Layers):
    """Has a layer that nobody uses, which fills the last bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.nobodys = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("option", ["views", "process group", "int8", "hook", "finite"])
@pytest.mark.parametrize("kind", [Layers, WithUnused])
@ranks(2, timeout=300)
def test_a_penalty_that_comes_later_is_an_error_once_and_no_rank_takes_the_step(
    kind: type[nn.Module], option: str
) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    with one_graph(kind, **OPTIONS.get(option, {})) as net:
        if option == "hook":
            net.ddp.register_comm_hook(None, allreduce_hook)
        is_first = dist.get_rank() == 0
        for number in range(8):
            loss = net.loss(number)
            if number >= 4 and is_first:
                loss = loss + net.penalty
            if number != 4:
                loss.backward()
                tolerance = LOOSE if option == "int8" else CLOSE
                net.assert_means(number, penalised=0.5 * (number > 4), **tolerance)
                continue
            error: Any = raises_if(is_first, RuntimeError, r"rank 0, step 5: .*layers\.1\.weight")
            if option == "finite":
                error = pytest.raises(FloatingPointError, match="on rank 0")
            with error:
                loss.backward()
            broken = [name for name, grad in gradients(net.ddp).items() if grad.isnan().all()]
            assert gather(broken) == [["layers.0.weight", "layers.0.bias"]] * 2


@ranks(2, timeout=300)
def test_the_error_comes_behind_the_ends_of_all_wrappers_in_a_backward() -> None:
    """So a rank may tell the others of it by a collective."""
    with fresh_dynamo():
        nets = [Net(DistributedDataParallel(seeded(Layers), **SMALL)) for _ in range(2)]
        for number in range(6):
            loss = sum(net.loss(number) for net in nets)
            if number == 4 and dist.get_rank() == 0:
                loss = loss + sum(net.penalty for net in nets)
            failed = torch.zeros(1)
            try:
                loss.backward()
            except RuntimeError:
                failed += 1
            dist.all_reduce(failed)
            assert failed.item() == (number == 4)
            broken = [
                name
                for net in nets
                for name, grad in gradients(net.ddp).items()
                if number != 4 or grad.isnan().any()
            ]
            assert len(broken) == (4 if number == 4 else 16)


@ranks(2, timeout=300)
def test_with_optimizers_in_the_backward_nothing_is_sent_too_early() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def trained(compiles: bool) -> list[Tensor]:
        module = seeded(Layers)
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(module, **SMALL)
        step = torch.compile(ddp, backend="aot_eager", fullgraph=True) if compiles else ddp
        for number in range(6):
            loss = loss_of(step(batch(number)))
            if number == 4 and dist.get_rank() == 0:
                loss = loss + module.layers[1].weight.square().sum()
            loss.backward()
        return [param.detach() for param in ddp.parameters()]

    with fresh_dynamo():
        torch.testing.assert_close(trained(True), trained(False), **CLOSE)


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
        rank, size = dist.get_rank(), dist.get_world_size()
        total = size * (size + 1) / 2
        for number in range(4):
            net.ddp.zero_grad()
            with net.ddp.weighted(rank + 1):
                loss_of(net.call(batch(number))).backward()
            alone = gather(gradients_alone(net.module, number))
            net.assert_gradients(
                {
                    name: sum((r + 1) / total * each[name] for r, each in enumerate(alone))
                    for name in alone[0]
                }
            )
