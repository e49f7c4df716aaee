"""Runs torch's own tests of DistributedDataParallel on CPUs over gloo.

Most of the tests do not need a GPU: they call ``.cuda(rank)`` or ``torch.cuda.set_device(rank)``,
pass ``device_ids=[rank]``, and compare numbers. Here all of these mean the CPU. Computations and
expectations of the tests are unchanged, except for the size of one image.
"""

import contextlib
import functools
import os
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

# The test module reads both when it is imported.
os.environ.update(BACKEND="gloo", WORLD_SIZE="2")

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal import common_distributed

import tritonddp


def _never_skips(*conditions: Any) -> Callable[[Any], Any]:
    return lambda test: test


# Also run the tests that need GPUs, and those that torch skips because of its CI.
with (
    mock.patch.multiple(
        common_distributed,
        skip_if_no_gpu=lambda test: test,
        skip_if_lt_x_gpu=_never_skips,
        nccl_skip_if_lt_x_gpu=_never_skips,
    ),
    mock.patch.multiple(unittest, skip=_never_skips, skipIf=_never_skips),
):
    from torch.testing._internal.distributed import distributed_test

STOCK = torch.nn.parallel.DistributedDataParallel
CLASSES = {"stock": STOCK, "ours": tritonddp.DistributedDataParallel}
_FACTORIES = ["arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"]


class TorchsTests(distributed_test.DistributedTest._DistTestBase, distributed_test.TestDistBackend):
    """All tests of the module, with longer limits, for slow or busy machines."""

    def _barrier(self, wait_for: int | None = None, timeout: float = 60) -> None:
        distributed_test.Barrier.sync(wait_for, max(timeout, 60))

    def _run_uneven_inputs_test(self, test_case: Any, *args: Any, **kwargs: Any) -> None:
        if test_case.name == "large_conv_model":  # 20 s a step on a CPU, with 1000 pixels a side
            test_case = test_case._replace(inp=test_case.inp[..., :20, :20])
        super()._run_uneven_inputs_test(test_case, *args, **kwargs)


def run(name: str, rank: int, world_size: int, ddp: str, folder: str) -> None:
    """Run one test as one rank.

    The process cannot be used afterwards, because names of torch are replaced.
    """
    os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), TEMP_DIR=folder)
    torch.set_num_threads(1)
    _let_cuda_mean_the_cpu(rank, world_size)
    for kind, cls in CLASSES.items():
        cls.__init__ = _checked(cls.__init__, allowed=kind == ddp)
    for module in (torch.nn.parallel, distributed_test):
        module.DistributedDataParallel = CLASSES[ddp]
    timeout = distributed_test.CUSTOM_PG_TIMEOUT.get(name, distributed_test.default_pg_timeout)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=distributed_test.timedelta(seconds=timeout),
    )
    test = TorchsTests(name)
    test.rank = rank
    test._barrier()
    getattr(test, name)()
    test._barrier()
    dist.destroy_process_group()


def _checked(init: Any, allowed: bool) -> Any:
    @functools.wraps(init)
    def construct(self: Any, *args: Any, device_ids: Any = None, **kwargs: Any) -> None:
        assert allowed, f"{type(self)} is not the class under test"
        kwargs.pop("output_device", None)
        init(self, *args, **kwargs)

    return construct


def _let_cuda_mean_the_cpu(rank: int, world_size: int) -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for cls in (torch.Tensor, nn.Module):
        cls.to = _on_cpu(cls.to)
    torch.Tensor.cuda = lambda tensor, device=None, non_blocking=False: tensor
    nn.Module.cuda = lambda module, device=None: module
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: rank
    torch.cuda.device_count = lambda: world_size
    torch.accelerator.current_stream = torch.cuda.Stream = torch.Event = _Immediate
    torch.cuda.stream = contextlib.nullcontext


class _Immediate:
    """A stream or an event of a device that does all work immediately."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for(kwargs["device"])
        if function.__name__ == "to":
            args = args[0], *map(_cpu_for, args[1:2]), *args[2:]
        return function(*args, **kwargs)

    return call


def _cpu_for(device: Any) -> Any:
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return torch.device("cpu") if is_number or str(device).startswith("cuda") else device
