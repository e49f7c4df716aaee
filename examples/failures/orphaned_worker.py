"""The kernel kills a rank; the others hang because a stuck DataLoader worker holds its sockets.

pytorch/pytorch#189290 (2026): workers inherit all open files of their parent, so its death closes
nothing, and the job hangs until something else ends it. There, torch's compiler starts the workers;
here, a DataLoader does. The launcher does not notice either: it started a wrapper script.
"""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        if dist.get_rank() == 1 and index == 30:
            os.kill(os.getppid(), signal.SIGKILL)  # as the kernel does when out of memory
            time.sleep(20)  # a file system that does not respond
        return torch.randn(64)


def main() -> None:
    if os.environ["RANK"] == "1" and (trainer := os.fork()):  # like `bash -c "python train.py"`
        os.waitpid(trainer, 0)
        time.sleep(20)  # the script copies files
        return
    # The default timeout is 30 minutes.
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    try:
        for batch in DataLoader(Files(), 8, num_workers=1):
            begin = time.monotonic()
            model(batch).square().mean().backward()
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    seconds = time.monotonic() - begin
    named = [line.strip() for line in said.splitlines() if line.strip().startswith("rank 1")]
    word = "right" if named and seconds < 10 else "wrong"
    text = named[0] if named else said.partition("] ")[2] or said
    print(f"verdict: {word}: rank 0 has waited for {seconds:.0f} s, then: {text!r}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
