"""Several forwards and backwards in a step, also where buffers change in between."""

import torch
from oracle import Net

from differential.named.models import (
    Branches,
    Heads,
    Multiplied,
    Normalized,
    NormalizedAsInEval,
    batch,
    branch,
)
from differential.named.table import RIGHT, TWICE, UNDEFINED, UNUSED, WRONG, program

# Several backwards.


@program(TWICE, WRONG, reductions=2)
def same_graph_twice(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").sum()
    loss.backward(retain_graph=True)
    loss.backward()


@program(TWICE, UNDEFINED, model=Heads, reductions=2)
def two_losses_of_one_graph(net: Net, rank: int, step: int) -> None:
    outputs = net(batch(), "abcd")
    outputs["a"][0].sum().backward(retain_graph=True)
    (outputs["a"][0].pow(2).sum() + outputs["c"][0].sum()).backward()


@program(TWICE, UNDEFINED, model=Heads, reductions=2)
def two_losses_that_share_a_trunk(net: Net, rank: int, step: int) -> None:
    trunk = branch(net, "f")(batch())
    outputs = net(trunk, "ab")
    outputs["a"][0].pow(2).sum().backward(retain_graph=True)
    outputs["b"][0].pow(2).sum().backward()


@program(TWICE, TWICE, reductions=2)
def two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "abc").sum(), net(batch(), "cde").sum()]
    for loss in losses:
        loss.backward()


@program(TWICE, UNDEFINED, reductions=2)
def two_forwards_then_two_backwards_in_reverse(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "abc").sum(), net(batch(), "cde").sum()]
    for loss in reversed(losses):
        loss.backward()


@program(UNUSED, TWICE)
def two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch(), "abc").sum() + net(batch(), "cde").sum()).backward()


@program(UNUSED, RIGHT, reductions=3)
def a_loss_per_microbatch(net: Net, rank: int, step: int) -> None:
    for names in ("abc", "cd" if rank else "ce", "ab"):
        net(batch(), names).pow(2).sum().backward()


@program(UNUSED, RIGHT, Branches, Branches, reductions=(1, 2))
def gan_alternation(nets: list[Net], rank: int, step: int) -> None:
    generator, judge = nets
    fake = generator(batch(), "ab")
    (judge(fake.detach(), "ab").sum() - judge(batch(), "ab").pow(2).sum()).backward()
    judge(fake, "ab").pow(2).sum().backward()


@program(UNUSED, RIGHT, Branches, Branches, reductions=1)
def gan_with_the_judge_frozen_for_the_generator(nets: list[Net], rank: int, step: int) -> None:
    generator, judge = nets
    fake = generator(batch(), "ab")
    (judge(fake.detach(), "ab").sum() - judge(batch(), "ab").pow(2).sum()).backward()
    with judge.no_sync():  # its own gradients of this loss are not wanted
        judged = judge(fake, "ab").pow(2).sum()
        judged.backward(inputs=list(generator.parameters()))


@program(UNUSED, RIGHT)
def forward_without_backward(net: Net, rank: int, step: int) -> None:
    net(batch(), "abc")
    with torch.no_grad():
        net(batch(), "abc")
    net(batch(), "ab").sum().backward()


# Buffers while a graph is alive.


@program(RIGHT, RIGHT, model=Normalized)
def batch_norm_two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch()).pow(2).sum() + net(batch()).pow(3).sum()).backward()


@program(WRONG, WRONG, model=Normalized, reductions=2)
def batch_norm_two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch()).pow(2).sum(), net(batch()).pow(3).sum()]
    for loss in losses:
        loss.backward()


@program(RIGHT, RIGHT, model=NormalizedAsInEval)
def batch_norm_in_eval_two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    assert not net.module.layers[1].training
    (net(batch()).pow(2).sum() + net(batch()).pow(3).sum()).backward()


@program(WRONG, WRONG, model=NormalizedAsInEval, reductions=2)
def batch_norm_in_eval_two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch()).pow(2).sum(), net(batch()).pow(3).sum()]
    for loss in losses:
        loss.backward()


@program(RIGHT, RIGHT, model=Multiplied)
def buffer_as_a_factor_two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch()).pow(2).sum() + net(batch()).pow(3).sum()).backward()
