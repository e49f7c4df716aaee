"""Processes that a rank forks, and threads that it starts."""

import copy
import os
import re
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from torch import Tensor, nn
from training import (
    assert_gradients_alike,
    assert_mean_of,
    drawn,
    gradients,
    in_threads,
    train_step,
)

from tritonddp import DistributedDataParallel


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.Linear(32, 4))


def batch(seed: int) -> Tensor:
    return drawn(3, 4, step=seed)


def step(net: nn.Module, seed: int) -> None:
    train_step(net, batch(seed))


# Forked processes


def in_child(call: Callable[[], Any]) -> str:
    """Run ``call`` in a forked process. Return its error, or "ended"."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            text = "ended"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(theirs, text.encode())
        os._exit(0)
    os.close(theirs)
    readable, _, _ = select.select([ours], [], [], 100)
    if not readable:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    answer = os.read(ours, 10_000).decode()
    os.close(ours)
    return answer or "hung or died"


@pytest.mark.parametrize("options", [{}, {"compression": "int8"}], ids=["plain", "int8"])
@ranks(2)
def test_a_forked_process_sends_nothing_and_training_continues(rank: int, options: Any) -> None:
    """Its messages on the shared connections would look like messages of the rank."""
    ddp = DistributedDataParallel(layers(), **options)
    without_buffers = DistributedDataParallel(nn.Linear(4, 2))
    for seed in range(2):
        step(ddp, seed)
    loss = ddp(batch(2)).sum()

    def evaluate(net: nn.Module = ddp) -> None:
        with torch.no_grad():
            net.eval()(batch(3))

    def join() -> None:
        with ddp.join():
            pass

    refused = [
        evaluate,
        join,
        lambda: step(ddp, 3),
        loss.backward,
        ddp.reduce_gradients,
        ddp.load_comm_state_dict,
        ddp.check_sync,
        lambda: DistributedDataParallel(layers()),
    ]
    text = (
        rf"RuntimeError: process \d+ was forked from rank {rank} of a process group and"
        r" is not a rank: .*bare module \(ddp\.module\)"
    )
    for call in refused:
        answer = in_child(call)
        assert re.match(text, answer), answer

    def train_alone() -> None:
        alone = layers()
        alone.load_state_dict(ddp.module.state_dict())
        step(ddp.module, 5)
        step(alone, 5)
        torch.testing.assert_close(gradients(ddp), gradients(alone))
        ddp.state_dict()

    assert in_child(train_alone) == "ended"
    assert in_child(lambda: evaluate(without_buffers)) == "ended"
    loss.backward()
    step(ddp, 3)
    assert_gradients_alike(ddp)
    assert all(param.grad.isfinite().all() for param in ddp.parameters())


# Threads


@ranks(2)
def test_two_threads_train_a_module_each_in_groups_of_their_own() -> None:
    nets = [
        DistributedDataParallel(layers(), process_group=dist.new_group(), bucket_cap_mb=1e-4)
        for _ in range(2)
    ]
    alone = [copy.deepcopy(net.module) for net in nets]

    def train(number: int) -> None:
        for seed in range(12):
            step(nets[number], seed + 50 * number)

    in_threads(lambda: train(0), lambda: train(1))
    for number in (0, 1):
        step(alone[number], 11 + 50 * number)
        assert_mean_of(nets[number], alone[number])
