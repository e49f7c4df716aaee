"""Collectives on process groups that are written in Python."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tritonddp._torch import timeout_of
from tritonddp.coordination.collectives import all_gather_into, all_reduce


class Work:
    """Whose ``wait`` needs no timeout, and whose result is another tensor."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> None:
        pass

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result([self.result])
        return future


class Group:
    """Of two ranks, of which the other one has the same."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        if not self.waits:
            return Work(2 * tensors[0])
        tensors[0].mul_(2)
        return None

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> None:
        for each in outputs[0]:
            each.copy_(tensors[0])


def test_a_work_written_in_python_brings_its_result_and_its_future() -> None:
    tensor = torch.ones(2)
    work = all_reduce(tensor, Group(waits=False))  # type: ignore[arg-type]
    work.wait()
    assert tensor.tolist() == [2, 2]
    assert work.get_future().wait()[0].tolist() == [2, 2]


def test_what_a_group_has_done_when_it_returns_is_complete() -> None:
    tensor, gathered = torch.ones(2), torch.zeros(4)
    work = all_reduce(tensor, Group(waits=True))  # type: ignore[arg-type]
    work.wait()
    assert work.get_future().done()
    assert tensor.tolist() == [2, 2]
    all_gather_into(gathered, tensor, Group(waits=True)).wait()  # type: ignore[arg-type]
    assert gathered.tolist() == [2, 2, 2, 2]


def test_what_a_group_without_backends_does_not_tell_is_not_known() -> None:
    assert timeout_of(dist.ProcessGroup(0, 1), torch.device("cpu")) is None
