"""How launches are prepared and made, with stubs in place of compiler and GPU."""

import contextlib
import itertools

import pytest
import torch
from stub_kernel import StubKernel

from tritonddp import _torch
from tritonddp.kernels import launch
from tritonddp.kernels.launch import Launcher


def run(kernel: StubKernel, grid: int, *arguments, **options) -> None:
    """As kernels do: prepare, and launch with the same arguments."""
    prepared = Launcher(kernel).prepare(grid, *arguments, **options)
    launch.run(None, prepared, *itertools.chain(*arguments))


@pytest.fixture
def tensors():
    return [torch.zeros(8, dtype=torch.int64), torch.zeros(8)]


def test_what_is_compiled_is_launched_with_all_arguments_in_order(tensors):
    kernel, before = StubKernel(), launch.launches
    run(kernel, 5, tensors, (3, 4), ("fp32", True))
    run(kernel, 6, tensors, (30, 40), ("fp32", True), num_warps=8)
    assert launch.launches - before == 2
    assert kernel.launched == [
        (1, (5, 1, 1), (*tensors, 3, 4, "fp32", True)),
        (2, (6, 1, 1), (*tensors, 30, 40, "fp32", True)),
    ]
    assert [(grid, warps) for grid, warps, _ in kernel.warmups] == [((5, 1, 1), 4), ((6, 1, 1), 8)]
    assert kernel.plainly == []
    Launcher(kernel).bind(1, tensors, (7,), ("fp16",), num_warps=4)()
    # Compiled, it takes addresses, for which Triton asks neither tensors nor the driver.
    addresses = [each.data_ptr() for each in tensors]
    assert kernel.launched[-1] == (3, (1, 1, 1), (*addresses, 7, "fp16"))


def test_an_interpreted_kernel_is_bound_to_tensors_and_to_none(tensors):
    kernel = StubKernel(interpreted=True)
    Launcher(kernel).bind(1, [*tensors, None], ((1, 2),), ())()
    assert kernel.plainly == [((1, 1, 1), 4, (*tensors, None, (1, 2)))]


def test_a_kernel_that_compiles_in_the_background_is_waited_for(tensors):
    kernel = StubKernel(asynchronous=True)
    run(kernel, 1, tensors, (), ())
    run(kernel, 1, tensors, (), ())
    assert len(kernel.launched) == 2


def test_an_interpreted_kernel_is_launched_plainly(tensors):
    kernel, before = StubKernel(interpreted=True), launch.launches
    for _ in range(2):
        run(kernel, 3, tensors, (9,), ("fp32",))
    assert launch.launches - before == 2
    assert kernel.plainly == [((3, 1, 1), 4, (*tensors, 9, "fp32"))] * 2


@pytest.mark.parametrize("where", ["compiler", "launch"])
def test_a_launch_that_fails_is_not_counted(tensors, where):
    def fail(*args, **options):
        raise RuntimeError("no such instruction")

    class Compiled(dict):
        __hash__ = object.__hash__

    class Failing(StubKernel):
        def warmup(self, *args, **options):
            return fail() if where == "compiler" else Compiled({(1, 1, 1): fail})

    before = launch.launches
    with pytest.raises(RuntimeError, match="no such instruction"):
        run(Failing(), 1, tensors, (), ())
    assert launch.launches == before


def test_a_launch_runs_on_the_device_of_its_tensors(monkeypatch):
    entered, seen = [], []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield
        entered.append("left")

    monkeypatch.setattr(_torch, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (None, 0, 1):
        launch.run(index, lambda: seen.append(list(entered)))
    assert seen == [[], [], [1]]
    assert entered == [1, "left"]
