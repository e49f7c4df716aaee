"""Processes that a rank forks, threads that it starts, and groups that are destroyed."""

import copy
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from launched import played
from torch import Tensor, nn
from training import (
    assert_gradients_alike,
    assert_mean_of,
    drawn,
    gradients,
    in_threads,
    train_step,
    wrap,
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
    answers, sending = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            call()
            sending.send("ended")
        except BaseException as error:
            sending.send(f"{type(error).__name__}: {error}")

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    answer = answers.recv() if answers.poll(100) else "hung or died"
    child.join(10)  # before the kill, so that it saves its coverage data
    child.kill()
    return answer


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
    nets = [wrap(layers(), process_group=dist.new_group(), bucket_cap_mb=1e-4) for _ in range(2)]
    alone = [copy.deepcopy(net.module) for net in nets]

    def train(number: int) -> None:
        for seed in range(12):
            step(nets[number], seed + 50 * number)

    in_threads(lambda: train(0), lambda: train(1))
    for number in (0, 1):
        step(alone[number], 11 + 50 * number)
        assert_mean_of(nets[number], alone[number])


# Destroyed groups

GLOBAL_WRAPPER = """
import sys, torch, torch.distributed as dist, tritonddp

dist.init_process_group("gloo")
ddp = tritonddp.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
sys.setswitchinterval(60)  # this thread keeps the interpreter
found = [torch.empty(4) for _ in range(2)]
dist.all_gather(found, torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_script_that_keeps_its_wrapper_to_its_end_does_not_abort(tmp_path: Path) -> None:
    """The wrapper, a global variable, keeps the group and its threads."""
    for _ in range(3):
        done = played(GLOBAL_WRAPPER, tmp_path, nproc=2)
        assert done.returncode == 0, done.stderr
