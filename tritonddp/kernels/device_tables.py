"""Device tables: tables of addresses, so that one launch processes any number of gradients.

A *chunk* is the work of one program: at most ``block`` consecutive elements of one gradient. The
chunks of a buffer never change. The addresses of the gradients may change every step. Together with
the used flags, the headers and the scale they form one small table at a fixed address.

Often only addresses change. They are then passed as arguments of a launch that writes them to the
table, which needs no pinned memory and no copy. Any other change is uploaded. ``flatten`` itself
does not take addresses as arguments, because each of its programs would select one of them, and the
compiler loads all of them first: for 64 gradients Triton 3.7 needs 61 registers on sm_90 instead of
32, and it spills for 256.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter, or_
from struct import pack, unpack
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonddp._device import is_capturing, upload, uploaded
from tritonddp._modes import outside_modes
from tritonddp.kernels import launch
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.launch import Launcher

# In elements of the wire dtype. So every 16-byte access to the buffer is aligned for any wire
# dtype, and the compiler can rely on that without a check per launch.
ALIGNMENT = 16

# Elements of a chunk, and warps of a program: 4 accesses of 16 bytes in flight per thread with
# about 30 registers. The same for all buffers, since no other choice was better: on an H100,
# buffers of 0.3 to 205 MB reached 97 to 100 % of the best bandwidth among 1024 to 8192 elements
# with 4 or 8 warps (benchmarks/results/gpu-h100/host.txt).
BLOCK, WARPS = 2048, 4

ADDRESS_OF = Tensor.data_ptr
_DTYPE_OF = attrgetter("dtype")

# Numbers of addresses that a launch may take as arguments; each number compiles a separate kernel.
# The largest takes 2 KiB of the 4 KiB of arguments that every GPU supports. More addresses are
# uploaded.
_SIZES = (16, 64, 256)
# A number that does not fit int32, so that addresses are always compiled as int64.
_ANY_ADDRESS = 1 << 40


@triton.jit(do_not_specialize=["addresses", "slots"])
def write_addresses_kernel(dynamic, addresses, slots):  # type: ignore[no-untyped-def]
    """Write the first ``slots`` of the ``addresses`` to the table, in one program."""
    for slot in tl.static_range(len(addresses)):
        tl.store(dynamic + slot, addresses[slot].to(tl.int64), mask=slot < slots)


_launch = Launcher(write_addresses_kernel)


class DeviceTables:
    """The tables of one flat buffer, on its device; shared by flatten and unflatten.

    Attributes:
        chunks: int64 ``(num_chunks, 4)``, one row per program: slot, first element within the
            gradient, first element within the buffer, number of elements (1 to ``block``).
            Gradients without elements have no rows.
        dynamic: int64 ``(2 n + m + 1,)``: n addresses (0 if there is no gradient), n used flags (0
            or 1), m headers, the bits of the scale as fp64. One copy uploads everything, and no
            launch depends on the scale's value.
        block: largest number of elements of a chunk, a power of two and a multiple of 16.
        addresses, dtype, used, headers, scale: values of the last update.
        uploads: number of copies of ``dynamic`` to the device so far.
        moves: number of launches so far that wrote addresses to it.
        launches: prepared launches for this buffer. The key is the kernel's launcher, and
            everything that is compiled in and may change between steps.
    """

    def __init__(
        self, flat: FlatBuffer, block: int | None = None, num_warps: int | None = None
    ) -> None:
        """Build the chunk rows of ``flat``.

        Raises:
            ValueError: ``block`` is not a power of two of at least 16, or the layout of the buffer
                is not aligned for 16-byte accesses.
        """
        block = BLOCK if block is None else block
        self.num_warps = WARPS if num_warps is None else num_warps  # per program
        if block < 16 or block & (block - 1):
            raise ValueError(f"block should be a power of two of at least 16, but is {block}")
        layout, device = flat.layout, flat.data.device
        for slot, offset in enumerate(layout.offsets):
            if offset % ALIGNMENT:
                raise ValueError(
                    f"slot {slot} starts at element {offset} of the buffer, which is not a "
                    f"multiple of {ALIGNMENT}. Create the layout with alignment={ALIGNMENT}"
                )
        self.block = block
        self.chunks = uploaded(self._rows(flat, block), device)
        self.num_chunks = self.chunks.shape[0]
        words = 2 * len(layout.numels) + layout.headers + 1
        self.dynamic = torch.zeros(words, dtype=torch.int64, device=device)
        self._slots = len(layout.numels)
        self._is_known = True  # dynamic matches the attributes below
        self.launches: dict[Any, Any] = {}
        self.one = torch.ones(1, dtype=torch.float64, device=device)  # used if there is no factor
        self.aligned = True  # every address is a multiple of 16 bytes
        self.usual_dtype = flat.dtype  # used to compile a flatten without any gradient
        self.uploads = self.moves = 0
        self.device_index = device.index if device.type == "cuda" else None
        self._layout = layout
        self._device = device
        self._device_number = flat.data.get_device()
        self.dtype: torch.dtype | None = None
        self.addresses: list[int] = [0] * len(layout.numels)
        self.used: list[bool] = [False] * len(layout.numels)
        self.headers: Sequence[int] = bytes(layout.headers)
        self.scale = 0.0
        self.is_captured = False
        self._captured: list[Tensor] = []  # sources of the copies in CUDA graphs
        self.in_place: tuple[int, list[int]] = 0, []

    def _rows(self, flat: FlatBuffer, block: int) -> Tensor:
        """Return the rows of :attr:`chunks`, on the CPU."""
        numels = torch.tensor(flat.layout.numels, dtype=torch.int64)
        offsets = torch.tensor(flat.layout.offsets, dtype=torch.int64)
        per_slot = (numels + block - 1) // block
        slot = torch.repeat_interleave(torch.arange(len(numels)), per_slot)
        first_row = torch.cumsum(per_slot, 0) - per_slot
        start = (torch.arange(len(slot)) - first_row[slot]) * block
        count = torch.clamp(numels[slot] - start, max=block)
        return torch.stack([slot, start, offsets[slot] + start, count], dim=1)

    @classmethod
    def of(cls, flat: FlatBuffer) -> Any:
        """Return the tables of ``flat``, which are built at the first call."""
        if flat.tables is None:
            with outside_modes([flat.data]):
                flat.tables = cls(flat)
        return flat.tables

    def update(
        self,
        grads: Sequence[Tensor | None],
        used: Sequence[bool] | None = None,
        scale: float | None = None,
        headers: Sequence[int] | None = None,
    ) -> torch.dtype | None:
        """Update ``dynamic`` on the current stream; upload it only if it changed.

        Args:
            grads: one per slot, each with its slot's shape and strides.
            used: one flag per slot. ``None``, here and below, keeps the last value.
            scale: the factor.
            headers: as many as in the layout; fastest if they are the same ``bytes`` each time.

        Returns:
            The dtype of the gradients; ``None`` if there are none.

        Raises:
            ValueError: the number of gradients or flags is not the number of slots; or the
                number of headers does not match the layout, or a header is not in 0..255.
            TypeError: the dtype or device of a gradient is not the expected one. Checked when
                an address or the first dtype changed, not at every launch.
        """
        # Fast path, if nothing has changed: in C, without calls of other functions. flatten and
        # JointUnflatten contain copies of it, to save the call.
        try:
            addresses = list(map(ADDRESS_OF, grads))  # type: ignore[arg-type]
            dtype = grads[0].dtype if grads else None  # type: ignore[union-attr]
        except TypeError:  # a gradient is missing
            return self.change(grads, used, scale, headers)
        if (
            addresses != self.addresses
            or dtype is not self.dtype
            or (used is not None and used != self.used)
            or (headers is not None and (headers or b"") != self.headers)
            # 0.0 equals -0.0.
            or (scale is not None and (scale != self.scale or not scale or self.is_captured))
        ):
            self.change(grads, used, scale, headers, addresses)
        return dtype

    def change(
        self,
        grads: Sequence[Tensor | None],
        used: Sequence[bool] | None = None,
        scale: float | None = None,
        headers: Sequence[int] | None = None,
        addresses: list[int] | None = None,
    ) -> torch.dtype | None:
        """Handle a possible change in :meth:`update`: check everything.

        ``addresses`` are the addresses of the gradients, if none is missing.
        """
        present: Any = grads
        if addresses is None:
            addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
            present = [grad for grad in grads if grad is not None]
        dtype = present[0].dtype if present else None
        slots = self._slots
        if len(addresses) != slots:
            raise ValueError(f"the buffer has {slots} slots, but got {len(addresses)} gradients")
        used = self.used if used is None else list(used)
        if len(used) != slots:
            raise ValueError(f"the buffer has {slots} slots, but got {len(used)} flags")
        if headers is None:
            headers = self.headers
        elif (headers or b"") == self.headers:
            headers = bytes(headers)  # the same object if it is bytes
        else:
            headers = self._layout.encode_headers(headers)
        has_moved = addresses != self.addresses
        if has_moved or dtype is not self.dtype:
            # A kernel cannot check an address: with a wrong dtype it would read garbage, and a host
            # address causes a fault on the device.
            if not (
                {dtype}.issuperset(map(_DTYPE_OF, present))
                # Compare device numbers: device objects would take three times as long.
                and {self._device_number}.issuperset(map(Tensor.get_device, present))
            ):
                self._refuse(grads, dtype)
            self.aligned = not reduce(or_, addresses, 0) & 15
        # Compare the bits of the scale: -0.0 equals 0.0, and NaN does not equal itself.
        bits = pack("<d", self.scale if scale is None else scale)
        is_uploaded = (
            used != self.used
            or headers != self.headers
            or bits != pack("<d", self.scale)
            or (has_moved and (slots > _SIZES[-1] or self.is_captured))
            or (self.is_captured and scale is not None)
            or not self._is_known
        )
        if is_uploaded or has_moved:
            self._is_known, self.addresses = False, []  # until the whole update is submitted
        if is_uploaded:
            words = [*addresses, *map(int, map(bool, used)), *headers, *unpack("<q", bits)]
            pinned = upload(self.dynamic, torch.frombuffer(array("q", words), dtype=torch.int64))
            self.uploads += 1
            if self.is_captured and is_capturing():
                self._captured.append(pinned)
        elif has_moved:
            run, padding = self.launches.get(_launch) or self._prepare()
            launch.run(self.device_index, run, (*addresses, *padding), slots)
            self.moves += 1
        self.addresses, self.dtype, self.used, self.headers = addresses, dtype, used, headers
        self.scale = self.scale if scale is None else scale
        self._is_known = True
        return dtype

    def compile(self) -> None:
        """Compile the kernel that writes addresses."""
        if self._slots <= _SIZES[-1]:
            self._prepare()

    def _prepare(self) -> tuple[Callable[..., None], tuple[int, ...]]:
        """Return the launch that writes addresses to :attr:`dynamic`, and the padding to add."""
        slots = self._slots
        size = next(each for each in _SIZES if slots <= each)
        given = (_ANY_ADDRESS,) * size, slots
        run = _launch.bind(1, (self.dynamic,), given, (), num_warps=1)
        run = partial(run.func, run.args[0], **run.keywords)
        self.launches[_launch] = run, (0,) * (size - slots)
        return self.launches[_launch]

    def check_places(self, flat: FlatBuffer, addresses: list[int]) -> bool:
        """Return True if ``addresses`` of ``flat.views`` are still their positions in ``flat``.

        They may have moved, because a view is ``.grad``, and any code may set its ``.data``.
        """
        first = flat.data.data_ptr()
        if self.in_place != (first, addresses):
            layout, size = flat.layout, flat.data.element_size()
            for address, offset, numel in zip(
                addresses, layout.offsets, layout.numels, strict=True
            ):
                if numel and address != first + offset * size:
                    return False
            self.in_place = first, addresses
        return True

    def forget_launches(self) -> None:
        """Drop all prepared launches, since they are bound to tensors that will be replaced."""
        self.launches.clear()

    @property
    def memory(self) -> list[Tensor]:
        """All tensors of these tables that kernels read."""
        return [self.chunks, self.one, self.dynamic]

    def capture(self) -> None:
        """Prepare for the capture of a CUDA graph, whose launches read :attr:`dynamic`.

        From now on each ``flatten`` uploads its table again, into the same memory: a replay may
        have overwritten it.
        """
        self.is_captured = True

    def _refuse(self, grads: Sequence[Tensor | None], dtype: torch.dtype | None) -> None:
        """Raise the error for the first gradient with another dtype or device."""
        for slot, grad in enumerate(grads):
            if grad is None:
                continue
            if grad.dtype is not dtype:
                raise TypeError(
                    f"the gradient in slot {slot} is {grad.dtype}, but the previous gradients are "
                    f"{dtype}. Use separate buffers for gradients of different dtypes"
                )
            if grad.device != self._device:
                raise TypeError(
                    f"the gradient in slot {slot} is on {grad.device}, but its buffer is on "
                    f"{self._device}. Move the parameter or the buffer"
                )
