"""Memory that the ranks of one host share.

It is anonymous (``memfd_create``); its file descriptor is sent over a Unix socket. So there is no
file in /dev/shm, and nothing stays when the processes have ended.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonddp._modes import outside_modes


@dataclass(eq=False)
class Memory:
    """Memory that ranks of this host share."""

    tensor: Tensor  # uint8 (nbytes,), mapped from the shared memory
    descriptor: int = -1  # file descriptor of the memory, until all ranks have it; -1 afterwards

    @classmethod
    def create(cls, nbytes: int) -> Memory:
        """New memory of zeros, which other ranks can map.

        Raises:
            OSError: there is no memory, or none that can be shared.
        """
        descriptor = os.memfd_create("tritonddp", os.MFD_CLOEXEC)
        try:
            # Allocate the pages now: a lack of memory is an error here, but a signal (SIGBUS) at
            # the first write to a page.
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(_mapped(descriptor, nbytes), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Memory:
        """Map the memory of another rank, and close its descriptor."""
        try:
            if os.fstat(descriptor).st_size < nbytes:  # a read behind its end would be a signal
                raise OSError(f"it is smaller than the {nbytes} bytes announced")
            return cls(_mapped(descriptor, nbytes))
        finally:
            os.close(descriptor)

    def close_descriptor(self) -> None:
        """Close the descriptor: no other rank needs to map the memory."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        self.close_descriptor()


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    # (Python's mmap would keep one more descriptor open for each mapping.)
    path = f"/proc/self/fd/{descriptor}"
    try:
        with outside_modes():
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).partition("\n")[0]) from error
