"""Several forwards and backwards in a step, also where buffers change in between."""

from oracle import Net

from differential.named.models import Branches, Checkpointed, Heads, Normalized, batch
from differential.named.table import RIGHT, TWICE, UNDEFINED, UNUSED, WRONG, program


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


@program(TWICE, TWICE, reductions=2)
def two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "abc").sum(), net(batch(), "cde").sum()]
    for loss in losses:
        loss.backward()


@program(UNUSED, TWICE)
def two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch(), "abc").sum() + net(batch(), "cde").sum()).backward()


@program(UNUSED, RIGHT, Branches, Branches, reductions=(1, 2))
def gan_alternation(nets: list[Net], rank: int, step: int) -> None:
    generator, judge = nets
    fake = generator(batch(), "ab")
    (judge(fake.detach(), "ab").sum() - judge(batch(), "ab").pow(2).sum()).backward()
    judge(fake, "ab").pow(2).sum().backward()


@program(UNUSED, TWICE, model=Checkpointed)
def not_reentrant_first_and_reentrant_later(net: Net, rank: int, step: int) -> None:
    net.module.reentrant = step > 0
    net(batch(), "aabcba").sum().backward()


# Buffers while a graph is alive.


@program(RIGHT, RIGHT, model=Normalized)
def batch_norm_two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch()).pow(2).sum() + net(batch()).pow(3).sum()).backward()


@program(WRONG, WRONG, model=Normalized, reductions=2)
def batch_norm_two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch()).pow(2).sum(), net(batch()).pow(3).sum()]
    for loss in losses:
        loss.backward()
