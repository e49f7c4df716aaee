"""Launch a kernel with a driver that does nothing, and print what Triton asks of the driver.

A script, for the same reason as compile_kernels.py. Prints a JSON list.

Triton compiles for an architecture without a GPU. Functions that do nothing replace the C functions
that launch and that query the driver. Tensors are on the CPU.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from tritonddp import _torch
from tritonddp.kernels import flatten
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.launch import OPTIONS

ENTER, EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
_ZERO = int  # a function in C without arguments
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
        # torch has the first in Python and the second in C.
        get_current_device=torch.cuda.current_device,
        get_current_stream=abs,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        allocate_default_profile_scratch=lambda *_: None,
    )
    patches = {
        "annotate_arguments": lambda signature: list(signature),
        # Up to Triton 3.6 each kernel has its own launcher in C.
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
        stack.enter_context(mock.patch.object(_torch, "current_device", _ZERO))
        yield


def main() -> None:
    asked: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> None:
        """As in Triton's launcher in C: call the hooks with the argument before them."""
        asked.append(arguments)
        place = next((at for at, each in enumerate(arguments) if each is ENTER), None)
        if place is not None:
            metadata, enter, leave = arguments[place - 1 : place + 2]
            enter(metadata)
            leave(metadata)

    facts: dict[str, Any] = {}
    with faked_driver(launch=launch):
        layout = Layout.of([(64, 64)], [(64, 1)], 16)
        flat = FlatBuffer(layout, torch.float32, torch.device("cpu"))
        flatten.flatten(flat, [torch.ones(64, 64)], [True], 0.5)
        tables, launches = flat.tables, flat.tables.launches
        prepared = next(
            found for key, found in launches.items() if flatten._launch in (key, key[0])
        )
        tensors = tables.chunks, tables.dynamic, flat.data
        options = {"grid": (1, 1, 1), "num_warps": tables.num_warps, **OPTIONS}
        kernel = flatten._launch.kernel.warmup(*tensors, *prepared.args[3:], **options)
        by_triton = partial(kernel[tables.num_chunks + 1, 1, 1], *prepared.args)

        def compare() -> list[list[str]]:
            """The types of the arguments of our launch that differ from Triton's arguments."""
            asked.clear()
            prepared()
            by_triton()
            ours, theirs = ([*_flat(arguments)] for arguments in asked)
            pairs = zip(ours, theirs, strict=True)
            return [[type(a).__name__, type(b).__name__] for a, b in pairs if a is not b and a != b]

        facts["unhooked"] = compare()
        for name, chain in (("enter", ENTER), ("exit", EXIT)):
            seen: list[str] = []
            note = lambda metadata, seen=seen: seen.append(metadata.get()["name"])  # noqa: E731
            chain.add(note)
            prepared()
            chain.remove(note)
            prepared()
            facts[name] = seen
        knobs.runtime.launch_enter_hook = lambda _: None
        facts["function"] = compare()
        knobs.runtime.launch_enter_hook = ENTER
    json.dump([facts], sys.stdout)


def _flat(arguments: tuple[Any, ...]) -> Any:
    for each in arguments:
        if isinstance(each, tuple | list):
            yield from _flat(tuple(each))
        else:
            yield each


if __name__ == "__main__":
    main()
