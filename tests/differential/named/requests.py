"""Gradients of ``autograd.grad``, and ``reduce_gradients``."""

import warnings
from collections.abc import Iterable

import torch
from oracle import Net
from torch import Tensor

from differential.named.models import batch, branch, samples
from differential.named.table import IN_PLACE, RIGHT, UNUSED, WRONG, program


@program(UNUSED, RIGHT)
def gradient_of_parameters(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").pow(2).sum()
    weights = list(branch(net, "b").parameters())
    torch.autograd.grad(loss, weights, retain_graph=True)
    torch.autograd.grad(net(batch(), "abc").sum(), list(net.parameters()), allow_unused=True)
    loss.backward()


@program(UNUSED, RIGHT)
def gradient_penalty(net: Net, rank: int, step: int) -> None:
    x = batch()
    output = net(x, "abc")
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.mean() + (gradient.norm() - 1).pow(2)).backward()


@program(IN_PLACE, IN_PLACE)
def backward_that_builds_a_graph(net: Net, rank: int, step: int) -> None:
    with warnings.catch_warnings():  # of a reference cycle, which the test runner collects
        warnings.simplefilter("ignore")
        net(batch(), "abc").pow(2).sum().backward(create_graph=True)


def add_to_grads(params: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            param.grad = gradient if param.grad is None else param.grad + gradient


@program(WRONG, WRONG, reductions=0)
def gradients_of_autograd_grad(net: Net, rank: int, step: int) -> None:
    params = list(net.parameters())
    loss = net(batch(), "abc" if rank else "bcd").pow(2).sum()
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    add_to_grads(params, net.reduce_gradients(gradients))


@program(WRONG, WRONG, reductions=0)
def gradients_by_name(net: Net, rank: int, step: int) -> None:
    names = ["branches.a.0.weight", "branches.c.2.bias"][: 1 + rank]
    params = dict(net.module.named_parameters())
    made = {name: torch.full_like(params[name], 1.0 + rank + step) for name in names}
    means = net.reduce_gradients(made)
    add_to_grads(params.values(), means.values())


@program(WRONG, WRONG)
def gradients_on_request_between_forward_and_backward(net: Net, rank: int, step: int) -> None:
    params = list(branch(net, "b").parameters())
    loss = net(batch(), "abcdef").pow(2).sum()
    gradients = torch.autograd.grad(loss, params, retain_graph=True)
    means = net.reduce_gradients(gradients, params)
    loss.backward()
    add_to_grads(params, means)


@program(WRONG, WRONG, reductions=0, weighted="mean")
def weighted_gradients_on_request(net: Net, rank: int, step: int) -> None:
    params = list(net.parameters())
    n = 1 + rank + step
    loss = net(samples(n), "abcdef").pow(2).mean()
    with net.weighted(n):
        gradients = net.reduce_gradients(torch.autograd.grad(loss, params), params)
        add_to_grads(params, gradients)
