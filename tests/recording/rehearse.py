"""Run a script as on a GPU, on the recorded device: python tests/recording/rehearse.py SCRIPT ARGS

A benchmark of ``make gpu``, made small. It names the device of each tensor: what it makes without
is the host's, and where tensors of both meet in one operation it fails, as on a GPU.
"""

import os
import runpy
import sys
from pathlib import Path
from types import FrameType

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path.pop(0)  # this folder, whose names are also those of others' modules
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

import torch
import torch.nn.parallel.distributed

from recording import device, small, timing

STOCK = torch.nn.parallel.distributed.__file__
TORCH = str(Path(torch.__file__).parent)


class _InStock:
    """True where stock DDP's C++ makes its buckets: it takes the tensors for the CPU's."""

    def __bool__(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == STOCK or frame.f_code.co_name == "_engine_run_backward":
                return True
            if not name.startswith((TORCH, __file__, str(Path(__file__).parent))):
                return False
            frame = frame.f_back
        return False


def main() -> int:
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    status = 0
    with device.recording(_InStock()) as recorder, timing.patched(recorder):  # type: ignore[arg-type]
        small.make_small()
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
