"""The package's kernels on the recorded device.

Tables, keys and launches are prepared as on a GPU. What is launched reads the tables as they are on
the device then, notes the memory that the addresses in them lead to, and does the work: flatten
and unflatten here, the quantizing kernels in Triton's interpreter.
"""

import contextlib
import ctypes
import inspect
import struct
import weakref
from collections.abc import Callable, Iterator
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


class _Compiled:
    """A kernel for the kinds of some arguments; equal to any for the same kinds, as Triton's is.

    Launches may have the addresses of those tensors, which they do not keep alive.
    """

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], kind: tuple[Any, ...]) -> None:
        self._kernel = kernel
        self._kind = kernel, kind
        self._tensors = {
            place: weakref.ref(each)
            for place, each in enumerate(arguments)
            if isinstance(each, Tensor)
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Compiled) and other._kind == self._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            given = list(arguments)
            for place, tensor in self._tensors.items():
                if not isinstance(given[place], Tensor):
                    found = tensor()
                    if found is None or found.data_ptr() != given[place]:
                        self._kernel.gone()
                        return
                    given[place] = found
            self._kernel(grid, *given)

        return launch


class _Launch:
    """In the place of a kernel: what :class:`~tritonddp.kernels.launch.Launcher` compiles."""

    def __init__(
        self, launcher: Launcher, name: str, launch: Callable[..., None], recorder: Recorder
    ) -> None:
        self.__name__ = name
        self._parameters = list(inspect.signature(launcher.kernel.fn).parameters.values())
        self._launch = launch
        self._recorder = recorder

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> _Compiled:
        kind = options["num_warps"], *map(_kind_of, self._parameters, arguments)
        return _Compiled(self, arguments, kind)

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        self._launch(grid, *arguments)
        self._recorder.replayable(partial(self._launch, grid, *arguments))

    def gone(self) -> None:
        """It is launched with an address where its tensor is no more."""
        self._recorder.races.append(f"{self.__name__} of a tensor that is gone or has moved")


def _kind_of(parameter: inspect.Parameter, argument: Any) -> Any:
    """What Triton compiles in of an argument."""
    if isinstance(argument, Tensor):
        # The alignment of a factor is none of it: see its kernels' do_not_specialize_on_alignment.
        return argument.dtype, parameter.name == "factor" or argument.data_ptr() % 16 == 0
    if argument is None or "constexpr" in str(parameter.annotation):
        return argument
    if isinstance(argument, tuple):
        return tuple(_kind_of(parameter, each) for each in argument)
    return "i32" if argument < 1 << 31 else "i64"


class Kernels:
    """What the kernels do to the memory of a device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._without_modes = device.without_modes

    def begin(self, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A kernel is launched on the current stream."""
        device, recorder = self._device, self._device.recorder
        recorder.run(recorder.current, what)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if not device.has(tensor):
                    recorder.races.append(f"{what} of a tensor that is not on the device")
                device.touch(recorder.current, tensor, is_write, what)

    def at_address(self, address: int, nbytes: int, writes: bool, what: str) -> bool:
        """The kernel follows an address of its table; returns whether that leads anywhere."""
        recorder = self._device.recorder
        memory = recorder.at(address)
        if memory is None or memory.is_pinned:
            recorder.races.append(f"{what} follows an address to no memory of the device")
            return False
        first = address - memory.address
        recorder.touch(recorder.current, memory, first, first + nbytes, writes, what)
        return True

    def flatten(self, grid: Any, *arguments: Any) -> None:
        """See ``flatten_kernel``."""
        chunks, dynamic, bucket = arguments[:3]
        slots, trailer, num_chunks, flags_offset = arguments[3:7]
        source, compute, block, flag_block, aligned, _ = arguments[7:]
        assert grid[0] == num_chunks + -(-trailer // flag_block)
        with self._without_modes():
            self.begin("flatten", [chunks, dynamic], [bucket])
            dtype, wide = _DTYPES[source], _DTYPES[compute]
            size, words = dtype.itemsize, dynamic.tolist()
            (scale,) = struct.unpack("<d", struct.pack("<q", words[slots + trailer]))
            line = torch.tensor(words[slots : slots + trailer], dtype=wide)
            bucket[flags_offset : flags_offset + trailer] = line.to(bucket.dtype)
            for slot, start, offset, count in chunks.tolist():
                assert count <= block
                target = bucket[offset : offset + count]
                address = words[slot]
                if not address:
                    target.zero_()
                    continue
                assert address % 16 == 0 or not aligned
                address += start * size
                if not self.at_address(address, count * size, False, "flatten"):
                    continue
                content = bytearray(ctypes.string_at(address, count * size))
                numbers = torch.frombuffer(content, dtype=dtype).to(wide)
                target.copy_(_narrow(numbers * torch.tensor(scale, dtype=wide), bucket.dtype))

    def addresses(self, grid: Any, dynamic: Tensor, addresses: Any, slots: int) -> None:
        """See ``write_addresses_kernel``."""
        with self._without_modes():
            self.begin("addresses", [], [dynamic])
            dynamic[:slots] = torch.tensor(addresses[:slots], dtype=torch.int64)

    def unflatten(self, grid: Any, *arguments: Any) -> None:
        """See ``unflatten_kernel``."""
        chunks, dynamic, bucket, factor, flags_offset = arguments[:5]
        target_dtype, wire_dtype, compute, block, aligned, in_place, _ = arguments[5:]
        assert grid[0] == len(chunks)
        with self._without_modes():
            read = [chunks, factor, *([] if bucket is None else [dynamic, bucket])]
            self.begin("unflatten", read, [])
            dtype, wire, wide = _DTYPES[target_dtype], _DTYPES[wire_dtype], _DTYPES[compute]
            size, scale = dtype.itemsize, factor.to(wide)
            if in_place and factor == 1 and wide is torch.float32:
                return
            rows = chunks.tolist()
            if bucket is not None:
                rows = [
                    (
                        dynamic[slot].data_ptr(),
                        start,
                        bucket[offset:].data_ptr(),
                        count,
                        bucket[flags_offset + slot].data_ptr(),
                    )
                    for slot, start, offset, count in rows
                ]
            for entry, start, source, count, used in rows:
                assert count <= block
                address = source
                if not in_place:
                    (address,) = self._numbers(entry, 1, torch.int64).tolist()
                if not address or self._numbers(used, 1, wire) == 0:
                    continue
                assert address % 16 == 0 or not aligned
                address += 0 if in_place else start * size
                if not self.at_address(address, count * size, True, "unflatten"):
                    continue
                numbers = _narrow(self._numbers(source, count, wire).to(wide) * scale, dtype)
                ctypes.memmove(address, numbers.contiguous().data_ptr(), count * size)

    def _numbers(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        """What unflatten reads at an address of its chunks."""
        nbytes = count * dtype.itemsize
        if not self.at_address(address, nbytes, False, "unflatten"):
            return torch.zeros(count, dtype=dtype)
        return torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=dtype)

    def interpreted(
        self,
        launcher: Any,
        what: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        follows: bool | None,
    ) -> Callable[..., None]:
        """The kernel itself.

        Args:
            launcher: whose kernel.
            what: its name.
            reads: which of its arguments it reads.
            writes: likewise.
            follows: it writes to the addresses of its table; ``None`` if it follows none, else it
                reads there.
        """
        kernel = launcher.kernel

        def launch(grid: Any, *arguments: Any) -> None:
            with self._without_modes():
                self.begin(what, [arguments[at] for at in reads], [arguments[at] for at in writes])
                if follows is not None:
                    chunks, words = arguments[0].tolist(), arguments[1].tolist()
                    named = dict(zip(kernel.arg_names, arguments, strict=False))
                    size = _DTYPES[named["TARGET" if follows else "SOURCE"]].itemsize
                    for slot, start, _, _, count in chunks:
                        if words[slot]:
                            address = words[slot] + start * size
                            self.at_address(address, count * size, follows, what)
                kernel[grid](*arguments, **launch_module.OPTIONS)

        return launch


def _narrow(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """From fp64 to 16 bits by way of fp32, as the kernels do."""
    if numbers.dtype is torch.float64 and dtype.itemsize == 2:
        numbers = numbers.float()
    return numbers.to(dtype)


@contextlib.contextmanager
def patched(device: Any) -> Iterator[None]:
    """Context: the kernels of a GPU are those of the recorded device."""
    work = Kernels(device)
    fakes = [
        (launcher, _Launch(launcher, name, launch, device.recorder))
        for launcher, name, launch in (
            (device_tables._launch, "addresses", work.addresses),
            (flatten._launch, "flatten", work.flatten),
            (unflatten._launch, "unflatten", work.unflatten),
        )
    ]
    if flatten.INTERPRETED:
        for module, name, places in (
            (quantize, "quantize", ((0, 1), (2, 3), False)),
            (reduce_parts, "reduce_parts", ((), (0, 1, 2, 3), None)),
            (dequantize, "dequantize", ((0, 1, 2, 3, 4), (), True)),
        ):
            launch = work.interpreted(module._launch, name, *places)
            fake = _Launch(module._launch, name, launch, device.recorder)
            fakes.append((module._launch, fake))
    with contextlib.ExitStack() as stack:
        for launcher, fake in fakes:
            stack.enter_context(mock.patch.object(launcher, "kernel", fake))
        for name, ours in (
            ("_for_device_type", dispatch.in_triton()),
            ("_quantized_for", dispatch.quantized_in_triton()),
        ):
            choose = partial(_choose, ours, getattr(dispatch, name))
            stack.enter_context(mock.patch.object(dispatch, name, choose))
        yield


def _choose(ours: Any, theirs: Callable[[str], Any], device_type: str) -> Any:
    return ours if device_type == "cuda" else theirs(device_type)
