"""The compiled-kernel cache, with stubs in place of compiler and GPU."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch

from tritonddp import _torch
from tritonddp.kernels import launch
from tritonddp.kernels.launch import Launcher, specialisation


class StubKernel:
    """What ``Launcher`` uses of a JITFunction; records instead of compiling and launching."""

    def __init__(self, interpreted: bool = False, asynchronous: bool = False) -> None:
        self.interpreted = interpreted
        self.asynchronous = asynchronous
        self.warmups: list[tuple] = []
        self.compiled_launches: list[tuple] = []
        self.jit_launches: list[tuple] = []

    def warmup(self, *args, grid, num_warps, enable_fp_fusion):
        assert not enable_fp_fusion  # each operation is rounded by itself, as on the CPU
        self.warmups.append((grid, num_warps, args))
        if self.interpreted:
            return None
        compiled = StubCompiled(self, len(self.warmups))
        return StubFuture(compiled) if self.asynchronous else compiled

    def __getitem__(self, grid):
        return lambda *args, num_warps, **_: self.jit_launches.append((grid, num_warps, args))


class StubCompiled:
    def __init__(self, kernel: StubKernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *args: self.kernel.compiled_launches.append((self.number, grid, args))


class StubFuture:
    def __init__(self, compiled: StubCompiled) -> None:
        self.compiled = compiled

    def result(self) -> StubCompiled:
        return self.compiled


def run(launcher: Launcher, grid: int, *arguments) -> None:
    """As kernels do: prepare, and launch with the same arguments."""
    prepared = launcher.prepare(grid, *arguments)
    launch.run(None, prepared, *itertools.chain(*arguments))


@pytest.fixture
def tensors():
    return [torch.zeros(8, dtype=torch.int64), torch.zeros(8)]


def test_a_kernel_is_compiled_once_and_launched_with_all_arguments_in_order(tensors):
    kernel = StubKernel()
    launcher = Launcher(kernel)
    before = launch.launches
    run(launcher, 5, tensors, (3, 4), ("fp32", True))
    run(launcher, 6, tensors, (30, 40), ("fp32", True))
    assert launch.launches - before == 2
    assert [(grid, num_warps) for grid, num_warps, _ in kernel.warmups] == [((5, 1, 1), 4)]
    assert kernel.compiled_launches == [
        (1, (5, 1, 1), (*tensors, 3, 4, "fp32", True)),
        (1, (6, 1, 1), (*tensors, 30, 40, "fp32", True)),
    ]
    assert kernel.jit_launches == []


def variants():
    memory = torch.zeros(32)
    base = {
        "device": torch.device("cpu"),
        "tensors": [memory[:8]],
        "integers": [7],
        "constexprs": ["fp32", 2048, True],
    }
    return base, {
        "device": {"device": torch.device("cuda", 1)},
        "dtype": {"tensors": [memory[:8].to(torch.bfloat16)]},
        "pointer alignment": {"tensors": [memory[1:9]]},
        "integer width": {"integers": [2**31]},
        "constexpr dtype": {"constexprs": ["bf16", 2048, True]},
        "constexpr block": {"constexprs": ["fp32", 1024, True]},
        "constexpr aligned": {"constexprs": ["fp32", 2048, False]},
    }


@pytest.mark.parametrize("what", variants()[1])
def test_the_key_tells_apart(what):
    base, others = variants()
    assert specialisation(**base) != specialisation(**(base | others[what]))


def test_the_key_ignores_what_is_not_compiled_in():
    base, _ = variants()
    memory = torch.zeros(64)
    # Another tensor at another aligned address, other values, 1 and 16 among them, which Triton
    # would specialise on if the kernel let it.
    for integer in (1, 16, 2**31 - 1):
        other = base | {"tensors": [memory[16:20]], "integers": [integer]}
        assert specialisation(**base) == specialisation(**other)


def test_the_key_knows_the_2_gib_limit_of_amd_buffer_instructions(monkeypatch):
    small = torch.zeros(4)
    large = torch.empty(2**29, device="meta")  # 2 GiB that take no memory
    arguments = (torch.device("cpu"), [small], [], []), (torch.device("cpu"), [large], [], [])
    monkeypatch.setattr(torch.version, "hip", None)
    assert specialisation(*arguments[0]) == specialisation(*arguments[1])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert specialisation(*arguments[0]) != specialisation(*arguments[1])


def test_each_key_has_its_own_compiled_kernel(tensors):
    kernel = StubKernel()
    launcher = Launcher(kernel)
    for aligned in (True, False, True, False):
        run(launcher, 1, tensors, (), (aligned,))
    assert [number for number, *_ in kernel.compiled_launches] == [1, 2, 1, 2]
    assert len(kernel.warmups) == 2


def test_each_number_of_warps_has_its_own_compiled_kernel(tensors):
    kernel = StubKernel()
    launcher = Launcher(kernel)
    for num_warps in (4, 8, 4, 8):
        launcher.bind(1, tensors, (), (), num_warps=num_warps)()
    assert [num_warps for _, num_warps, _ in kernel.warmups] == [4, 8]
    assert [number for number, *_ in kernel.compiled_launches] == [1, 2, 1, 2]


def test_kernels_do_not_share_a_cache(tensors):
    kernels = [StubKernel(), StubKernel()]
    for kernel in kernels:
        run(Launcher(kernel), 1, tensors, (), ())
    assert [len(kernel.compiled_launches) for kernel in kernels] == [1, 1]


def test_a_kernel_that_compiles_in_the_background_is_waited_for(tensors):
    kernel = StubKernel(asynchronous=True)
    launcher = Launcher(kernel)
    run(launcher, 1, tensors, (), ())
    run(launcher, 1, tensors, (), ())
    assert len(kernel.warmups) == 1
    assert len(kernel.compiled_launches) == 2


def test_an_interpreted_kernel_is_launched_plainly(tensors):
    kernel = StubKernel(interpreted=True)
    launcher = Launcher(kernel)
    before = launch.launches
    for _ in range(2):
        run(launcher, 3, tensors, (9,), ("fp32",))
    assert launch.launches - before == 2
    assert kernel.jit_launches == [((3, 1, 1), 4, (*tensors, 9, "fp32"))] * 2


def test_another_kernel_in_place_of_the_first_is_compiled_anew(tensors):
    kernels = [StubKernel(), StubKernel()]
    launcher = Launcher(kernels[0])
    for kernel in (*kernels, kernels[0]):
        launcher.kernel = kernel
        run(launcher, 1, tensors, (), ())
    assert [len(kernel.compiled_launches) for kernel in kernels] == [2, 1]


@pytest.mark.parametrize("where", ["compiler", "launch"])
def test_a_launch_that_fails_is_not_counted(tensors, where):
    def fail(*args, **options):
        raise RuntimeError("no such instruction")

    class Failing(StubKernel):
        def warmup(self, *args, **options):
            return fail() if where == "compiler" else {(1, 1, 1): fail}

    before = launch.launches
    with pytest.raises(RuntimeError, match="no such instruction"):
        run(Launcher(Failing()), 1, tensors, (), ())
    assert launch.launches == before


class Guard:
    """Takes the place of ``torch.cuda.device``."""

    entered: ClassVar[list] = []

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.entered.append(self.device)

    def __exit__(self, *_):
        self.entered.append("left")


@pytest.fixture
def entered(monkeypatch):
    """Devices that became the current one; it is 0 otherwise."""
    monkeypatch.setattr(_torch, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(Guard, "entered", [])
    return Guard.entered


def test_the_device_is_changed_only_where_it_is_another_one(entered):
    for device in ("cpu", "cuda:0"):
        with launch.current(torch.device(device)):
            assert entered == []
    with launch.current(torch.device("cuda:1")):
        assert entered == [torch.device("cuda:1")]
    assert entered[-1] == "left"


def test_a_launch_runs_on_the_device_of_its_tensors(entered):
    seen = []
    for index in (None, 0, 1):
        launch.run(index, lambda: seen.append(list(entered)))
    assert seen == [[], [], [1]]
    assert entered == [1, "left"]
