"""Memory that the ranks of one host share.

The memory is anonymous (``memfd_create``); its file descriptor is sent over a Unix socket. So there
is no file in /dev/shm, and nothing remains when the processes have ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_int, c_size_t, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonddp._modes import outside_modes

_MAP_FIXED = 0x10  # not defined in Python


@dataclass(eq=False)
class Memory:
    """Memory that ranks of this host share."""

    tensor: Tensor  # uint8 (nbytes,), mapped from the shared memory
    descriptor: int = -1  # file descriptor of the memory; -1 when it is closed

    @classmethod
    def create(cls, nbytes: int, is_reserved: bool = True) -> Memory:
        """Return new zeroed memory, which other ranks can map.

        Without ``is_reserved``, call :meth:`reserve` for each part before it is used.

        Raises:
            OSError: there is no memory, or none that can be shared.
        """
        descriptor = os.memfd_create("tritonddp", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            memory = cls(_mapped(descriptor, nbytes), descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if is_reserved:
            memory.reserve(0, nbytes)
        return memory

    def reserve(self, first: int, nbytes: int) -> None:
        """Allocate pages now. Otherwise a lack of memory is a SIGBUS at the first write to a page.

        Raises:
            OSError: there is no memory.
        """
        os.posix_fallocate(self.descriptor, first, nbytes)

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Memory:
        """Map the memory of another rank, and close its descriptor."""
        try:
            if os.fstat(descriptor).st_size < nbytes:  # a read after its end would be a signal
                raise OSError(f"the shared memory is smaller than the {nbytes} bytes announced")
            return cls(_mapped(descriptor, nbytes))
        finally:
            os.close(descriptor)

    def detach(self) -> None:
        """Make the mapping private in a forked process: the ranks do not see its later writes.

        Raises:
            OSError: the system refuses that.
        """
        # The same addresses become a private mapping. Python's mmap does not accept an address.
        remap = ctypes.CDLL(None, use_errno=True).mmap
        remap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_size_t]
        remap.restype = c_void_p
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        address, nbytes = self.tensor.data_ptr(), self.tensor.nbytes
        if remap(address, nbytes, access, flags, self.descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), "the memory of gradients cannot be made private")

    def close_descriptor(self) -> None:
        """Close the descriptor, when no other rank needs to map the memory."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        self.close_descriptor()


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    # Python's mmap would keep one additional descriptor open for each mapping.
    path = f"/proc/self/fd/{descriptor}"
    try:
        with outside_modes():
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).partition("\n")[0]) from error
