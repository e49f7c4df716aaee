"""The package's kernels on the recorded device.

Tables, keys and launches are prepared as on a GPU. A launch reads the tables on the device, records
accesses to the addresses in them, and does the work. The quantizing kernels run in the interpreter.
Flatten and unflatten are implemented here, which is 50 times as fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import struct
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from recording.recorder import Recorder
from tritonddp.kernels import device_tables, dispatch, flatten, unflatten
from tritonddp.kernels import launch as launch_module
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.quantized import dequantize, quantize, reduce_parts

_DTYPES = {triton: dtype for dtype, triton in flatten.TRITON_DTYPES.items()}


@dataclass(frozen=True)
class _Compiled:
    """A kernel that is compiled for certain kinds of arguments.

    A launch may have the address of a tensor instead of the tensor, which is not kept alive.
    """

    kernel: _Kernel
    kind: tuple[Any, ...]
    tensors: dict[int, weakref.ref[Tensor]] = field(compare=False)  # by their places

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            given = list(arguments)
            for place, tensor in self.tensors.items():
                if not isinstance(given[place], Tensor):
                    found = tensor()
                    if found is None or found.data_ptr() != given[place]:
                        self.kernel.report_moved()
                        return
                    given[place] = found
            self.kernel(grid, *given)

        return launch


class _Kernel:
    """Replaces the kernel of a :class:`~tritonddp.kernels.launch.Launcher`."""

    def __init__(
        self, launcher: Launcher, name: str, launch: Callable[..., None], recorder: Recorder
    ) -> None:
        self.__name__ = name
        self._parameters = list(inspect.signature(launcher.kernel.fn).parameters.values())
        self._launch = launch
        self._recorder = recorder

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> _Compiled:
        kind = options["num_warps"], *map(_kind_of, self._parameters, arguments)
        tensors = {
            place: weakref.ref(each)
            for place, each in enumerate(arguments)
            if isinstance(each, Tensor)
        }
        return _Compiled(self, kind, tensors)

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        self._launch(grid, *arguments)
        self._recorder.replayable(partial(self._launch, grid, *arguments))

    def report_moved(self) -> None:
        self._recorder.races.append(f"{self.__name__} of a tensor that was freed or has moved")


def _kind_of(parameter: inspect.Parameter, argument: Any) -> Any:
    """The property of an argument for which Triton compiles."""
    if isinstance(argument, Tensor):
        # Except the alignment of a factor: see do_not_specialize_on_alignment of its kernels.
        return argument.dtype, parameter.name == "factor" or argument.data_ptr() % 16 == 0
    if argument is None or "constexpr" in str(parameter.annotation):
        return argument
    if isinstance(argument, tuple):
        return tuple(_kind_of(parameter, each) for each in argument)
    return "i32" if argument < 1 << 31 else "i64"


class Kernels:
    """The work of the kernels on the memory of a device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    @contextlib.contextmanager
    def _running(self, what: str, reads: list[Tensor], writes: list[Tensor]) -> Iterator[None]:
        """Context: a kernel runs on the current stream."""
        device, recorder = self._device, self._device.recorder
        with device.without_modes():
            recorder.run(recorder.current, what)
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    if not device.has(tensor):
                        recorder.races.append(f"{what} of a tensor that is not on the device")
                    device.touch(recorder.current, tensor, is_write, what)
            yield

    def _at(self, address: int, count: int, dtype: torch.dtype, writes: bool, what: str) -> Tensor:
        """The elements at an address of a table; zeros if it is not on the device."""
        recorder, nbytes = self._device.recorder, count * dtype.itemsize
        memory = recorder.at(address)
        if memory is None or memory.is_pinned:
            recorder.races.append(f"{what} follows an address to no memory of the device")
            return torch.zeros(count, dtype=dtype)
        first = address - memory.address
        recorder.touch(recorder.current, memory, first, first + nbytes, writes, what)
        content = (ctypes.c_char * nbytes).from_address(address)
        return torch.frombuffer(content, dtype=dtype) if count else torch.zeros(0, dtype=dtype)

    def flatten(self, grid: Any, *arguments: Any) -> None:
        """See ``flatten_kernel``."""
        chunks, dynamic, bucket = arguments[:3]
        slots, trailer, num_chunks, flags_offset = arguments[3:7]
        source, compute, block, flag_block, aligned, _ = arguments[7:]
        assert grid[0] == num_chunks + -(-trailer // flag_block)
        with self._running("flatten", [chunks, dynamic], [bucket]):
            dtype, wide, words = _DTYPES[source], _DTYPES[compute], dynamic.tolist()
            (scale,) = struct.unpack("<d", struct.pack("<q", words[slots + trailer]))
            line = torch.tensor(words[slots : slots + trailer], dtype=wide)
            bucket[flags_offset : flags_offset + trailer] = line.to(bucket.dtype)
            for slot, start, offset, count in chunks.tolist():
                address, target = words[slot], bucket[offset : offset + count]
                assert count <= block
                assert address % 16 == 0 or not aligned
                if not address:
                    target.zero_()
                    continue
                address += start * dtype.itemsize
                grad = self._at(address, count, dtype, False, "flatten")
                numbers = grad.to(wide) * torch.tensor(scale, dtype=wide)
                target.copy_(_narrow(numbers, bucket.dtype))

    def addresses(self, grid: Any, dynamic: Tensor, addresses: Any, slots: int) -> None:
        """See ``write_addresses_kernel``."""
        with self._running("addresses", [], [dynamic]):
            dynamic[:slots] = torch.tensor(addresses[:slots], dtype=torch.int64)

    def unflatten(self, grid: Any, *arguments: Any) -> None:
        """See ``unflatten_kernel``."""
        chunks, dynamic, bucket, factor, flags_offset = arguments[:5]
        target_dtype, wire_dtype, compute, block, aligned, in_place, _ = arguments[5:]
        assert grid[0] == len(chunks)
        read = [chunks, factor, *([] if bucket is None else [dynamic, bucket])]
        with self._running("unflatten", read, []):
            dtype, wire, wide = _DTYPES[target_dtype], _DTYPES[wire_dtype], _DTYPES[compute]
            if in_place and factor == 1 and wide is torch.float32:
                return
            rows = chunks.tolist()
            if bucket is not None:  # the rows have slots instead of addresses
                at, flags = bucket.data_ptr(), bucket.data_ptr() + flags_offset * wire.itemsize
                rows = [
                    (
                        *(dynamic.data_ptr() + slot * 8, start),
                        *(at + offset * wire.itemsize, count, flags + slot * wire.itemsize),
                    )
                    for slot, start, offset, count in rows
                ]
            for entry, start, source, count, flag in rows:
                assert count <= block
                address = source
                if not in_place:
                    address = int(self._at(entry, 1, torch.int64, False, "unflatten"))
                if not address or not self._at(flag, 1, wire, False, "unflatten"):
                    continue
                assert address % 16 == 0 or not aligned
                address += 0 if in_place else start * dtype.itemsize
                numbers = self._at(source, count, wire, False, "unflatten")
                target = self._at(address, count, dtype, True, "unflatten")
                target.copy_(_narrow(numbers.to(wide) * factor.to(wide), dtype))

    def interpreted(
        self, launcher: Any, what: str, reads: int, writes: int, follows: str | None = None
    ) -> Callable[..., None]:
        """The kernel ``what`` itself, in the interpreter.

        It reads the first ``reads`` arguments, and writes the next ``writes``. ``follows``: it
        reads from the addresses of its table ("SOURCE"), or writes to them ("TARGET").
        """
        kernel = launcher.kernel

        def launch(grid: Any, *arguments: Any) -> None:
            written = list(arguments[reads : reads + writes])
            with self._running(what, list(arguments[:reads]), written):
                if follows is not None:
                    chunks, words = arguments[0].tolist(), arguments[1].tolist()
                    named = dict(zip(kernel.arg_names, arguments, strict=False))
                    dtype = _DTYPES[named[follows]]
                    for slot, start, _, _, count in chunks:
                        if words[slot]:
                            address = words[slot] + start * dtype.itemsize
                            self._at(address, count, dtype, follows == "TARGET", what)
                kernel[grid](*arguments, **launch_module.OPTIONS)

        return launch


def _narrow(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """From fp64 to 16 bits in two steps via fp32, as the kernels do."""
    if numbers.dtype is torch.float64 and dtype.itemsize == 2:
        numbers = numbers.float()
    return numbers.to(dtype)


@contextlib.contextmanager
def patched(device: Any) -> Iterator[None]:
    """Context: the kernels of the recorded device replace the kernels of a GPU."""
    work = Kernels(device)
    launches = {
        device_tables: ("addresses", work.addresses),
        flatten: ("flatten", work.flatten),
        unflatten: ("unflatten", work.unflatten),
    }
    if flatten.INTERPRETED:
        for module, name, *accesses in (
            (quantize, "quantize", 2, 2, "SOURCE"),
            (reduce_parts, "reduce_parts", 0, 4),
            (dequantize, "dequantize", 5, 0, "TARGET"),
        ):
            launches[module] = name, work.interpreted(module._launch, name, *accesses)
    with contextlib.ExitStack() as stack:
        for module, (name, launch) in launches.items():
            kernel = _Kernel(module._launch, name, launch, device.recorder)
            stack.enter_context(mock.patch.object(module._launch, "kernel", kernel))
        for name, ours in (
            ("_for_device_type", dispatch.in_triton()),
            ("_quantized_for", dispatch.quantized_in_triton()),
        ):
            choose = partial(_choose, ours, getattr(dispatch, name))
            stack.enter_context(mock.patch.object(dispatch, name, choose))
        yield


def _choose(ours: Any, theirs: Callable[[str], Any], device_type: str) -> Any:
    return ours if device_type == "cuda" else theirs(device_type)
