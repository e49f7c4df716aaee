"""A rank that fails, or dies, during a step of owners: the others are told, and do not hang."""

import multiprocessing
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair
from distributed import give_up_after, ranks
from modules import mlp
from training import breaking_off, drawn, squares


class Failing(torch.optim.SGD):
    """Its steps raise on rank 1, if they are to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails and dist.get_rank() == 1:
            raise ArithmeticError("on purpose")
        return super().step(closure)


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, timeout=60)
def test_a_step_that_raises_on_one_rank_ends_the_others(rank: int, transport: str) -> None:
    pair = Pair(mlp(4, 8, 2), Failing, wrapper=TRANSPORTS[transport], lr=0.01)
    for number in range(3):
        pair.step(drawn(5, 4, step=number))
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    give_up_after(3, dist.group.WORLD)
    squares(pair.zero(drawn(5, 4))).backward()
    pair.optimizer.optim.fails = True  # type: ignore[attr-defined]
    if rank == 1:
        with pytest.raises(ArithmeticError, match="on purpose"):
            pair.optimizer.step()
        store.wait(["told"])
    else:
        with pytest.raises(RuntimeError, match="rank 1") as caught:
            pair.optimizer.step()
        assert "optimizer step" in str(caught.value), str(caught.value)
        store.set("told", "")


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2)
def test_a_backward_that_breaks_off_on_one_rank_is_recovered_from(
    rank: int, transport: str
) -> None:
    """The others get NaN, as documented; after that both train as before."""
    pair = Pair(mlp(4, 8, 8, 2), wrapper=TRANSPORTS[transport])
    for number in range(6):
        x = drawn(5, 4, step=number)
        if number != 3:
            pair.step(x)
            continue
        for net, optimizer in pair.each():
            with breaking_off(net.module[2].weight, rank == 1):
                squares(net(x)).backward()
            optimizer.zero_grad()
    pair.check()


def die_before_a_step(transport: str, rank: int, store: str, answers: Any) -> None:
    """A rank of :func:`test_a_rank_that_dies_before_the_step_is_named`."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=20)
    files = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=2, timeout=limit)
    pair = Pair(mlp(4, 8, 2), wrapper=TRANSPORTS[transport])
    for number in range(3):
        pair.step(drawn(5, 4, step=number))
    squares(pair.zero(drawn(5, 4))).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pair.optimizer.step()
    except RuntimeError as error:
        answers.put(str(error))
        answers.close()
        answers.join_thread()
    os._exit(0)


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_before_the_step_is_named(transport: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = [(transport, rank, str(tmp_path / "store"), answers) for rank in range(2)]
    processes = [context.Process(target=die_before_a_step, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        text = answers.get(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert "optimizer step" in text
    assert "rank 1" in text
