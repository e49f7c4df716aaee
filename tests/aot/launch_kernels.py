"""Launch a kernel by a driver that does nothing, and print what Triton has asked of the driver.

A script, for the same reason as compile_kernels.py. Prints a JSON list.

Triton compiles for an architecture without a GPU. Functions that do nothing replace those in C that
launch and that ask the driver. Tensors are on the CPU. The time of a real driver (some 5 us for a
launch) is not measured.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from tritonddp import _torch
from tritonddp.kernels import flatten, unflatten
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.launch import OPTIONS

ENTER, EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
_ZERO = int  # a function in C that takes no argument
_PROPERTIES = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


@contextlib.contextmanager
def faked_driver(launch: Callable[..., Any]) -> Iterator[None]:
    """Context: Triton finds one GPU, the current one, and calls ``launch`` to launch."""
    utils = SimpleNamespace(
        launch=launch,
        build_signature_metadata=lambda _: b"",
        load_binary=lambda *_: (1, 1, 30, 0, 1024),
        unload_module=lambda *_: None,
        get_device_properties=lambda _: _PROPERTIES,
    )
    driver = SimpleNamespace(
        utils=utils,
        launcher_cls=nvidia.CudaLauncher,
        # As torch's are, one in Python and one in C.
        get_current_device=torch.cuda.current_device,
        get_current_stream=abs,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        allocate_default_profile_scratch=lambda *_: None,
    )
    patches = {
        "annotate_arguments": lambda signature: list(signature),
        # Up to Triton 3.6 each kernel has a launcher in C of its own.
        "library_dirs": list,
        "compile_module_from_src": lambda **_: SimpleNamespace(launch=launch),
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            if hasattr(nvidia, name):
                stack.enter_context(mock.patch.object(nvidia, name, value))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(mock.patch.object(torch.cuda, "_initialized", True))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getDevice", _ZERO, create=True))
        # Where CUDA is built in, the same function.
        stack.enter_context(mock.patch.object(_torch, "current_device", _ZERO))
        yield


def counted(function: Callable[[], Any]) -> int:
    """Number of functions that the third of three calls runs, in Python and in C."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(2):
        function()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 1  # without setprofile itself


def steady() -> tuple[FlatBuffer, dict[str, Callable[[], Any]]]:
    """A bucket whose launches are prepared, and the calls of a step."""
    shapes, strides = [[64, 64]] * 15, [(64, 1)] * 15
    layout = Layout.of(shapes, strides, 16, 3)
    flat = FlatBuffer(layout, torch.float32, torch.device("cpu"))
    grads, used = [torch.ones(64, 64) for _ in shapes], [True] * 15
    functions = {
        "flatten": partial(flatten.flatten, flat, grads, used, 0.5, bytes(3)),
        "unflatten": partial(unflatten.unflatten, flat, grads),
    }
    for function in functions.values():
        function()
        function()
    flat.tables.device_index = 0  # as for tensors on the current GPU
    return flat, functions


def main() -> None:
    asked: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> None:
        """As Triton's in C, which calls the hooks with the argument before them."""
        asked.append(arguments)
        place = next((at for at, each in enumerate(arguments) if each is hooks[0]), None)
        if place is not None:
            metadata, enter, leave = arguments[place - 1 : place + 2]
            for hook in (enter, leave):
                if hook is not None:
                    hook(metadata)

    hooks = [ENTER, EXIT]
    facts: dict[str, Any] = {}
    with faked_driver(launch=launch):
        flat, functions = steady()
        tables, launches = flat.tables, flat.tables.launches
        prepared = next(
            found for key, found in launches.items() if flatten._launch in (key, key[0])
        )

        def compiled() -> Any:
            """The kernel that flattens ``flat``."""
            tensors = tables.chunks, tables.dynamic, flat.data
            options = {"grid": (1, 1, 1), "num_warps": tables.num_warps, **OPTIONS}
            return flatten._launch.kernel.warmup(*tensors, *prepared.args[3:], **options)

        def by_triton() -> Callable[[], None]:
            """The same launch through Triton's own functions."""
            return partial(compiled()[tables.num_chunks + 1, 1, 1], *prepared.args)

        def compare() -> list[list[str]]:
            """The types of the arguments of our launch that differ from those of Triton's."""
            asked.clear()
            prepared()
            by_triton()()
            ours, theirs = ([*_flat(arguments)] for arguments in asked)
            pairs = zip(ours, theirs, strict=True)
            return [[type(a).__name__, type(b).__name__] for a, b in pairs if a is not b and a != b]

        facts["unhooked"] = compare()
        seen: list[Any] = []
        for name, chain in (("enter", ENTER), ("exit", EXIT)):
            note = lambda metadata, name=name: seen.append([name, metadata.get()["name"]])  # noqa: E731
            chain.add(note)
            seen.clear()
            prepared()
            facts[name] = list(seen)
            facts[f"{name}, arguments"] = compare()
            chain.remove(note)
            seen.clear()
            prepared()
            facts[f"{name}, removed"] = list(seen)
        facts["again"] = compare()
        for name, other in (("function", lambda _: None), ("none", None)):
            knobs.runtime.launch_enter_hook = hooks[0] = other
            facts[name] = compare()
            knobs.runtime.launch_enter_hook = hooks[0] = ENTER
        kernel = compiled()
        raw = partial(kernel.run, 1, 1, 1, 0, kernel.function, b"", None, None, None)
        facts["compiled once"] = kernel is compiled()
        facts["calls"] = {
            "run": counted(raw),
            "prepared": counted(prepared),
            "by triton": counted(by_triton()),
            **{name: counted(function) for name, function in functions.items()},
        }
    json.dump([facts], sys.stdout)


def _flat(arguments: tuple[Any, ...]) -> Any:
    for each in arguments:
        if isinstance(each, tuple | list):
            yield from _flat(tuple(each))
        else:
            yield each


if __name__ == "__main__":
    main()
