"""Tensors on the CPU that report that they are on a GPU."""

import contextlib
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from versions import COLLECTS_LIVE_STORAGES

from recording import autograd, cuda, kernels, nccl
from recording.recorder import DEVICE, Memory, Recorder, Timeline, extent, package_stack, tensors_in
from tritonddp import _torch

# Methods that read a tensor on the host without an operation that is dispatched.
_READS = ("tolist", "numpy", "__array__")
_aten = torch.ops.aten
_ITEM = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
# The host must know the size of the result.
_SIZED_BY_CONTENT = (
    _aten.nonzero.default,
    _aten._coalesce.default,
    _aten.masked_select.default,
    _aten._unique2.default,
)
# They accept tensors of the host together with tensors of a GPU, or use only their shapes.
_MIXED = ("aten::index", "aten::empty_like", "aten::zeros_like", "aten::ones_like")
# They read and write no elements.
_EMPTY = ("aten::empty", "aten::new_empty")
_NO_WORK = ("aten::set_", "aten::resize_", "aten::_sparse_", "aten::record_stream", "profiler::")


class Device:
    """The tensors of the device, and the accesses to them.

    Attributes:
        place: where tensors are created now: "device", "host" or "pinned".
    """

    def __init__(self, recorder: Recorder, everywhere: bool = False) -> None:
        self.recorder = recorder
        self.everywhere = everywhere
        self.place: str | None = None

    @staticmethod
    @contextlib.contextmanager
    def without_modes() -> Iterator[None]:
        """Context: operations of torch are not recorded."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield

    # Memory

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """The memory of a dense ``tensor``, if it is on the device or pinned."""
        if tensor.layout is not torch.strided:
            return None
        return self.recorder.live.get(tensor.untyped_storage()._cdata)

    def has(self, tensor: Tensor) -> bool:
        memory = self.memory_of(_parts(tensor)[-1])
        return memory is not None and not memory.is_pinned

    def take(self, tensor: Tensor, is_pinned: bool = False) -> None:
        """Declare that ``tensor`` is on the device, or pinned."""
        for part in _parts(tensor):
            if self.memory_of(part) is None:
                storage, recorder = part.untyped_storage(), self.recorder
                key, address = storage._cdata, storage.data_ptr()
                memory = recorder.allocated(key, address, storage.nbytes(), is_pinned)
                weakref.finalize(storage, recorder.freed, key, memory).atexit = False

    def touch(self, timeline: Timeline, tensor: Tensor, writes: bool, what: str) -> None:
        """Let ``timeline`` read or write ``tensor``."""
        for part in _parts(tensor):
            if (memory := self.memory_of(part)) is not None:
                place = part.storage_offset(), part.shape, part.stride()
                first, end = extent(*place, part.element_size())
                self.recorder.touch(timeline, memory, first, end, writes, what)

    def guard(self, tensors: Sequence[Tensor], timeline: Timeline) -> None:
        """Do not reuse their memory before the queued work of ``timeline`` is complete."""
        with torch._C.DisableTorchFunction():
            for part in itertools.chain(*map(_parts, tensors)):
                if memory := self.memory_of(part):
                    memory.guards.add(timeline)

    # Between host and device

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Run ``target.copy_(source)`` between host and device on the current stream."""
        recorder, stream = self.recorder, self.recorder.current
        host = source if self.has(target) else target
        is_pinned = self.memory_of(host) is not None
        recorder.run(stream, "copy to the device" if host is source else "copy to the host")
        self.touch(stream, source, False, "copy")
        self.touch(stream, target, True, "copy")
        if not is_pinned:
            recorder.host_waits(stream.clock, "copy of memory that is not pinned")
        elif not non_blocking:
            recorder.host_waits(stream.clock, "copy that blocks")
        elif host is target and not recorder.capturing:
            recorder.hide(target)

    def read(self, tensor: Tensor, what: str) -> None:
        """Let the host read ``tensor``: it waits for the device, or should have waited."""
        recorder = self.recorder
        if self.has(tensor):
            recorder.run(recorder.current, "copy to the host")
            self.touch(recorder.current, tensor, False, what)
            recorder.host_waits(recorder.current.clock, what)
        else:
            recorder.host.step()
            self.touch(recorder.host, tensor, False, what)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold the content of ``tensor``."""
    is_sparse = tensor.layout is torch.sparse_coo
    return [tensor._indices(), tensor._values()] if is_sparse else [tensor]


class _Operations(TorchDispatchMode):
    """Records what the operations of torch read and write."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device, place, name = self._device, self._device.place, func.name()
        recorder = device.recorder
        given = [*tensors_in((args, kwargs))]
        on_device = list(map(device.has, given))
        if device.everywhere and place is None and not given and not package_stack():
            place = "device"
        is_elsewhere = place in (None, "host") and not any(map(device.memory_of, given))
        if is_elsewhere and not any(on_device):
            return func(*args, **kwargs)
        if func.namespace == "c10d" or name.startswith(_NO_WORK):
            return func(*args, **kwargs)
        if func in _ITEM and any(on_device):
            for tensor in given:
                device.read(tensor, name)
            return func(*args, **kwargs)
        result = self._call(func, args, kwargs)
        if name.startswith("aten::_foreach_") and func._schema.is_mutable:
            increment_version(args[0])  # as the kernels for CUDA do, below autograd
        if func is _aten.copy_.default and on_device[0] is not on_device[1]:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            device.copy(args[0], args[1], bool(non_blocking))
            recorder.replayable(partial(func, *args, **kwargs))
            return result
        if func.is_view:
            return result
        made = [*tensors_in(result)]
        runs_on_device = place != "host" and (any(on_device) or place == "device")
        if place == "pinned" or runs_on_device:
            for tensor in made:
                if device.memory_of(tensor) is None:
                    device.take(tensor, place == "pinned")
        if not runs_on_device:  # the host reads or writes pinned memory
            recorder.host.step()
            self._touch(recorder.host, func, args, kwargs, made)
            return result
        for tensor, is_there in zip(given, on_device, strict=True):
            if not is_there and tensor.dim() and not name.startswith(_MIXED):
                recorder.races.append(f"{func} of tensors on the host and on the device")
        if not name.startswith(_EMPTY):
            recorder.run(recorder.current, name)
            self._touch(recorder.current, func, args, kwargs, made)
        recorder.replayable(partial(_again, partial(self._call, func, args, kwargs), made))
        if func in _SIZED_BY_CONTENT:
            recorder.host_waits(recorder.current.clock, name)
        return result

    def _touch(
        self, timeline: Timeline, func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]
    ) -> None:
        """Let ``timeline`` read and write the arguments, and write the results."""
        if func.name().startswith(_EMPTY):
            return
        accesses = []
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            accesses += [(tensor, writes) for tensor in tensors_in(value)]
        for tensor, writes in (*accesses, *((tensor, True) for tensor in made)):
            self._device.touch(timeline, tensor, writes, func.name())

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Round zero-dimensional operands as CUDA does; the package must not use such operands.

        CUDA loads them in the dtype of the other operands, also in bf16. Only numbers and tensors
        on the CPU keep their precision.
        """
        if torch.Tag.pointwise in func.tags or func.name().startswith("aten::_foreach_"):
            others = {
                each.dtype
                for each in tensors_in((args, kwargs))
                if each.dim() and each.dtype is not torch.bool
            }
            if others:
                load = partial(self._loaded, func, reduce(torch.promote_types, others))
                args, kwargs = tree_map(load, (args, kwargs))
        return func(*args, **kwargs)

    def _loaded(self, func: Any, common: torch.dtype, operand: Any) -> Any:
        if not isinstance(operand, Tensor) or operand.dim() or not self._device.has(operand):
            return operand
        if torch.promote_types(operand.dtype, common) == common or not (
            operand.is_floating_point() or operand.is_complex() or common.is_floating_point
        ):
            return operand
        if stack := package_stack():
            text = f"{func} rounds an operand without dimensions to {common} ({stack})"
            self._device.recorder.races.append(text)
        return operand.to(common)


def _again(call: Callable[[], Any], made: list[Tensor]) -> None:
    """Repeat an operation in a replay, into the same memory."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        new = [*tensors_in(call())]
        for target, source in zip(made, new, strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)


class _Appearance(TorchFunctionMode):
    """Tensors report that they are on the device, and factories create them there."""

    def __init__(self, device: Device, streams: autograd.Streams) -> None:
        super().__init__()
        self._device = device
        self._streams = streams

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = self._device
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(func.__self__, "__name__", "")
            if attribute in ("device", "is_cpu", "is_cuda") and device.has(args[0]):
                return DEVICE if attribute == "device" else attribute == "is_cuda"
            return func(*args, **kwargs)
        if name in ("to", "cpu", "cuda") and isinstance(args[0], Tensor):
            return self._to(name, args[0], [*args[1:]], dict(kwargs))
        if name == "is_pinned":
            return (memory := device.memory_of(args[0])) is not None and memory.is_pinned
        if name in _READS and isinstance(args[0], Tensor):
            device.read(args[0], name)
            return func(*args, **kwargs)
        former, device.place = device.place, self._place(kwargs)
        try:
            result = func(*args, **kwargs)
        finally:
            place, device.place = device.place, former
        self._streams.note(result)
        if name in ("tensor", "as_tensor") and place == "device":
            device.take(result)
            device.recorder.run(device.recorder.current, "copy to the device")
            device.touch(device.recorder.current, result, True, name)
            device.recorder.host_waits(device.recorder.current.clock, f"torch.{name}")
        return result

    def _place(self, kwargs: dict[str, Any]) -> str | None:
        """Where the operation creates its result; its arguments are changed to the CPU."""
        place = None
        given = kwargs.get("device")
        if given is not None:
            is_cuda = isinstance(given, int) or torch.device(given).type == "cuda"
            place = "device" if is_cuda else "host"
            kwargs["device"] = torch.device("cpu")
        if kwargs.pop("pin_memory", False):
            place = "pinned"
        return place

    def _to(self, name: str, tensor: Tensor, rest: list[Any], options: dict[str, Any]) -> Tensor:
        """Run ``tensor.to(*rest, **options)``, or ``cpu`` or ``cuda``."""
        device, cpu, copies = self._device, torch.device("cpu"), options.pop("copy", False)
        if name != "to":
            rest = [cpu if name == "cpu" else DEVICE]
        elif rest and isinstance(rest[0], Tensor):
            rest[:1] = [DEVICE if device.has(rest[0]) else cpu, rest[0].dtype]
        if len(rest) > 3:  # copy as a positional argument
            copies = rest.pop(3)
        target, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **options)
        if target is None or (target.type == "cuda") is device.has(tensor):
            with mock.patch.object(device, "place", None):
                result = tensor.to(dtype or tensor.dtype, copy=copies)
            self._streams.note(result)
            return result
        with _disable_current_modes():
            copy = tensor.to(dtype or tensor.dtype, copy=True)
        if target.type == "cuda":
            device.take(copy)
        elif non_blocking:
            device.take(copy, is_pinned=True)
        device.copy(copy, tensor, non_blocking)
        return copy


@contextlib.contextmanager
def recording(everywhere: bool = False) -> Iterator[Recorder]:
    """Context: there is a GPU, ``cuda:0``, with NCCL, and its work is recorded.

    Args:
        everywhere: all code outside the package creates its tensors on the device.
    """
    recorder = Recorder()
    device = Device(recorder, everywhere)
    streams = autograd.Streams(device)
    appearance, operations = _Appearance(device, streams), _Operations(device)
    run_backward: Callable[..., Any] = torch.autograd._engine_run_backward

    def with_modes(*args: Any, **kwargs: Any) -> Any:
        # The mode handles Tensor.backward, but is off inside of it; hooks need it.
        modes = torch.overrides._get_current_function_mode_stack()
        with (
            contextlib.nullcontext() if appearance in modes else appearance,
            streams.backward(args[0]),
        ):
            return run_backward(*args, **kwargs)

    # Its frame must look like a frame of torch, where no caller is searched.
    as_torch = types.FunctionType(
        with_modes.__code__,
        {**globals(), "__name__": "torch.recorded"},
        closure=with_modes.__closure__,
    )

    def record_stream(tensor: Tensor, stream: Any) -> None:
        device.guard([tensor], stream.timeline)

    def metadata(tensor: Tensor) -> dict[str, Any]:
        # Checkpoints compare it inside operations, which no mode sees, and outside of them.
        return {"dtype": tensor.dtype, "shape": tensor.shape}

    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    collector = contextlib.ExitStack()
    if COLLECTS_LIVE_STORAGES:  # it frees the Python objects of storages that are in use
        gc.disable()
        collector.callback(gc.enable)
    with (
        collector,
        mock.patch.dict(checks, {torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE: metadata}),
        cuda.patched(recorder),
        nccl.patched(device),
        kernels.patched(device),
        streams.patched(),
        mock.patch.object(torch.autograd, "_engine_run_backward", as_torch),
        mock.patch.object(Tensor, "record_stream", record_stream),
        # The device exists only with its modes.
        mock.patch.object(_torch, "without_function_modes", contextlib.nullcontext),
        mock.patch.object(_torch, "without_dispatch_modes", contextlib.nullcontext),
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", as_torch),
        operations,
        appearance,
    ):
        yield recorder
        gc.collect()
