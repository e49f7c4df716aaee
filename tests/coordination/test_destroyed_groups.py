"""A process group that is destroyed is gone, with its threads, and none aborts the process."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from launched import played
from torch import nn

from tritonddp import DistributedDataParallel


@ranks(3)
def test_a_thread_that_ends_does_not_take_the_group_apart() -> None:
    """It would do so after anybody can wait for it, even while the interpreter ends."""
    group = dist.new_group()
    ddp = DistributedDataParallel(nn.Linear(64, 64), process_group=group, compression="int8")
    before = set(threading.enumerate())
    for _ in range(2):
        ddp(torch.ones(1, 64)).sum().backward()
    (thread,) = set(threading.enumerate()) - before
    reference = weakref.ref(group)
    dist.barrier()  # nobody is in the group's collectives any more
    del ddp
    dist.destroy_process_group(group)
    del group
    thread.join()
    gc.collect()
    assert reference() is None, "what is kept for the thread keeps the group"


ONE_RANK = """
import gc, pathlib, time, torch, torch.distributed as dist, tritonddp

gc.disable()  # the group is in no reference cycle

def has_threads():
    found = 0
    for name in pathlib.Path("/proc/self/task").glob("*/comm"):
        try:
            found += "gloo" in name.read_text()
        except OSError:  # it has just ended
            pass
    return found > 0

def train():
    ddp = tritonddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.step()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train()
print(has_threads())
dist.destroy_process_group()
deadline = time.monotonic() + 60
while has_threads() and time.monotonic() < deadline:  # the system lists those that just ended
    time.sleep(0.01)
print(has_threads())
"""


@pytest.mark.long
def test_a_group_that_is_destroyed_leaves_no_thread(tmp_path: Path) -> None:
    """One that drops its last tensor while the interpreter ends aborts the process."""
    done = played(ONE_RANK, tmp_path)
    assert done.stdout.split() == ["True", "False"], done.stderr


SLOW_THREAD = """
import time, torch, torch.distributed as dist, tritonddp, weakref

def hook(state, bucket):
    global slow
    inner = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
    future = inner.then(lambda done: done.value()[0] if state else None)
    sleep = lambda _: time.sleep(1)
    inner.add_done_callback(sleep)  # all callbacks are let go behind it
    slow = weakref.ref(sleep)
    return future

def train():
    ddp = tritonddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    ddp.register_comm_hook(dist.group.WORLD, hook)
    ddp(torch.ones(1, 2)).sum().backward()

for _ in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train()
    dist.destroy_process_group()
    while slow() is not None:
        time.sleep(0.1)
print("ended")
"""


@pytest.mark.long
def test_a_group_may_be_destroyed_while_a_thread_lets_go_of_callbacks(tmp_path: Path) -> None:
    """The thread would wait for its own end: "terminate called ... Resource deadlock avoided"."""
    done = played(SLOW_THREAD, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended\n"


SCRIPT = """
import sys, torch, torch.distributed as dist, tritonddp

dist.init_process_group("gloo")
ddp = tritonddp.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
sys.setswitchinterval(60)  # this thread does not let others have the interpreter
found = [torch.empty(4) for _ in range(2)]
dist.all_gather(found, torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_script_that_keeps_its_wrapper_to_its_end_does_not_abort(tmp_path: Path) -> None:
    """The wrapper, a global, keeps the group and its threads. One in two runs did abort."""
    for _ in range(3):
        done = played(SCRIPT, tmp_path, nproc=2)
        assert done.returncode == 0, done.stderr
