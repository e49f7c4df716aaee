"""Manual finalization: the caller waits for the reduced gradients."""

import pytest
import torch
from distributed import assert_same_bits, ranks
from modules import mlp
from training import filled, gradients, train_step

from tritonddp import DistributedDataParallel


@ranks(2)
def test_errors_of_manual_finalization() -> None:
    net = DistributedDataParallel(mlp(4, 4, 4), bucket_cap_mb=1e-5)
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        net.finalize_backward()
    net.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        net.finalize_backward()
    with net.no_sync():
        net(filled(2, 4)).sum().backward()
    net(filled(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward"):
        net(filled(2, 4))
    with pytest.raises(RuntimeError, match="cannot be called after forward"):
        net.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward"):
        net.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with torch.no_grad():
        net(filled(2, 4))
    net.finalize_backward()
    assert_same_bits(net.module[2].bias.grad, torch.full((4,), 2.0 + 2.0))
    output = net(filled(2, 4))
    output.register_hook(lambda _: net.finalize_backward())
    with pytest.raises(RuntimeError, match=r"before all DDP buckets were ready. next_bucket_=0"):
        output.sum().backward()
    # It can be disabled after a failed backward.
    net.zero_grad()
    net.require_manual_backward_finalization = False
    train_step(net, filled(2, 4), loss=torch.sum)
    assert all(grad.isfinite().all() for grad in gradients(net))
