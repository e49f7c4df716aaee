"""A module that is replicated in place, on a GPU: headers are read one step later."""

import pytest
import torch
import torch.distributed as dist
from distributed import ranks

from recording.device import recording
from recording.programs import WARM_UP, Net
from tritonddp import replicate


@ranks(2, interprets=True, timeout=60)
def test_a_probe_of_one_rank_is_an_error_on_both_in_the_next_backward() -> None:
    with recording():
        torch.manual_seed(0)
        net = replicate(Net().to("cuda"), bucket_cap_mb=6e-4)
        x = torch.randn(5, 6).to("cuda")

        def step() -> None:
            net.zero_grad()
            net(x).sum().backward()

        for _ in range(WARM_UP):
            step()
        if dist.get_rank() == 0:
            net(x[:2]).max(1).values.sum().backward()
        else:
            step()
        output = net(x)
        with pytest.raises(RuntimeError, match=r"option 'backward\(\)': rank 0 has 'called in"):
            output.sum().backward()
        torch.cuda.synchronize()
