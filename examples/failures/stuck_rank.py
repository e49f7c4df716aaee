"""One rank is stuck in its tokenizer, and the others wait until a timeout that names no rank.

huggingface/accelerate#3380 (2025), pytorch/pytorch#118369 and many others: after half an hour, the
timeout of a collective ends the job. It names neither the rank nor the line.
"""

import logging
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

said: list[str] = []


class Keep(logging.Handler):
    """Keeps the log messages of this rank while it waits."""

    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


def tokenize(step: int) -> torch.Tensor:
    if dist.get_rank() == 1 and step == 3:
        time.sleep(25)  # a lock, a download, a regular expression
        os._exit(0)  # the other ranks have given up
    return torch.randn(8, 64)


def main() -> None:
    logging.getLogger().addHandler(Keep())
    # The default timeout is 30 minutes; tritonddp reports the stuck rank after one minute.
    # tritonddp: os.environ["TRITONDDP_HANG_SECONDS"] = "4"
    logging.captureWarnings(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    try:
        for step in range(6):
            model(tokenize(step)).square().mean().backward()
    except RuntimeError as error:
        said.append(str(error).partition("] ")[2] or str(error))
    lines = [line.strip() for each in said for line in each.splitlines()]
    named = [line for line in lines if line.startswith("rank 1") or "tokenize" in line][:2]
    word = "right" if len(named) == 2 else "wrong"
    print(f"verdict: {word}: rank 0 has said {' '.join(named) or lines[0]!r}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
