"""Unused parameters without any flag, outputs that the loss ignores, ranks that disagree."""

from modules import Withheld
from oracle import Net

from differential.named.models import Heads, batch, branch
from differential.named.table import RIGHT, TWICE, TWICE_HANGS, UNDEFINED, UNUSED, program

# Unused parameters, no flag.


@program(UNUSED, TWICE)
def custom_function_gives_none_on_one_rank(net: Net, rank: int, step: int) -> None:
    weight = branch(net, "c")[0].weight
    Withheld.apply(net(batch(), "ab"), weight, rank == 1).sum().backward()


@program(UNUSED, UNUSED)
def backward_with_respect_to_some(net: Net, rank: int, step: int) -> None:
    weights = [branch(net, "a")[0].weight, branch(net, "c")[0].bias]
    net(batch(), "abc").sum().backward(inputs=weights)


# Outputs that the loss ignores, parameters used outside forward.


@program(UNUSED, RIGHT, model=Heads)
def different_outputs_ignored_on_each_rank(net: Net, rank: int, step: int) -> None:
    outputs = net(batch(), "abcdef")
    names = ["ab", "c", "ef", "abcdef"][(step + rank) % 4]
    sum(outputs[name][0].sum() for name in names).backward()


@program(UNUSED, TWICE_HANGS)
def used_outside_forward_on_one_rank(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "ab").sum()
    if rank:
        loss = loss + branch(net, "c")[0].weight.pow(2).sum()
    loss.backward()


@program(RIGHT, TWICE)
def penalty_on_all_weights(net: Net, rank: int, step: int) -> None:
    penalty = sum(param.pow(2).sum() for param in net.parameters())
    (net(batch(), "ab").pow(2).mean() + 0.1 * penalty).backward()


# Ranks that disagree.


@program(UNUSED, UNDEFINED, reductions=2)
def different_control_flow(net: Net, rank: int, step: int) -> None:
    """One rank sums two losses of one forward each; another runs one forward twice."""
    if rank == 0:
        losses = [net(batch(), "abc").sum(), net(batch(), "d").pow(2).sum()]
    elif rank == 1:
        output = net(batch(), "bca")
        losses = [output.pow(2).sum(), net(output.detach(), "b").sum()]
    else:
        losses = [net(net(batch(), "e"), "a").sum(), net(batch(), "").sum()]
    for loss in losses if step % 2 else reversed(losses):
        loss.backward()
