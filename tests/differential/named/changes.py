"""Parameters that are frozen, unfrozen, replaced or added after wrapping."""

from oracle import Net
from torch import nn

from differential.named.models import Branches, batch, branch
from differential.named.table import RIGHT, UNUSED, WRONG, program


@program(WRONG, WRONG, model=lambda: partly_frozen(Branches()))
def frozen_when_wrapped_and_unfrozen_later(net: Net, rank: int, step: int) -> None:
    branch(net, "a").requires_grad_(step > 0)
    net(batch(), "abcdef").sum().backward()


@program(WRONG, RIGHT)
def frozen_between_forward_and_backward(net: Net, rank: int, step: int) -> None:
    net.requires_grad_(True)
    loss = net(batch(), "abcdef").sum()
    branch(net, "a").requires_grad_(False)
    loss.backward()


@program(UNUSED, RIGHT)
def frozen_inside_a_window(net: Net, rank: int, step: int) -> None:
    """Gradients that were accumulated before are reduced."""
    net.requires_grad_(True)
    with net.no_sync():
        net(batch(), "abcdef").sum().backward()
    branch(net, "a").requires_grad_(step == 0)
    net(batch(), "abcdef").sum().backward()


@program(WRONG, WRONG, model=lambda: partly_frozen(Branches()))
def unfrozen_inside_a_window(net: Net, rank: int, step: int) -> None:
    branch(net, "a").requires_grad_(step > 1)
    with net.no_sync():
        net(batch(), "abcdef").sum().backward()
        branch(net, "a").requires_grad_(step > 0)
        net(batch(), "abcdef").sum().backward()
    net(batch(), "bcdef").sum().backward()


@program(WRONG, WRONG)
def layers_added(net: Net, rank: int, step: int) -> None:
    """Before the first step too."""
    if step != 1:
        net.module.branches[f"added{step}"] = constant(0.2)
    net(batch(), [*net.module.branches]).sum().backward()


@program(WRONG, WRONG)
def adapters_added_and_the_rest_frozen(net: Net, rank: int, step: int) -> None:
    if step == 1:
        net.requires_grad_(False)
        for name in "abc":
            branch(net, name).append(constant(0.1))
    net(batch(), "abcdef").sum().backward()


def partly_frozen(net: Branches) -> Branches:
    net.branches["a"].requires_grad_(False)
    return net


def constant(value: float) -> nn.Linear:
    layer = nn.Linear(4, 4).double()
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, value)
    return layer
