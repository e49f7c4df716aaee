import copy, contextlib
import pytest, torch, torch.distributed as dist
from beside_replicated import Pair, TRANSPORTS, owner_of
from distributed import ranks, gather, assert_same_bits
from modules import *
from torch import nn
from training import drawn, squares
from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer

@pytest.mark.parametrize("t", TRANSPORTS)
@pytest.mark.parametrize("view", [False, True])
@ranks(2, timeout=30)
def test_two_backwards_no_zero(rank, t, view):
    pair = Pair(mlp(4, 8, 8, 2), wrapper={**TRANSPORTS[t], "gradient_as_bucket_view": view})
    for n in range(5):
        for net, opt in pair.each():
            for k in range(2):
                squares(net(drawn(5, 4, step=2*n+k))).backward()
        pair.check_gradients() if n else None
        for net, opt in pair.each():
            opt.step(); opt.zero_grad()
        pair.check(f"step {n}")

@pytest.mark.parametrize("t", TRANSPORTS)
@ranks(2, timeout=30)
def test_basic(rank, t):
    pair = Pair(mlp(4, 8, 8, 2), wrapper={**TRANSPORTS[t]})
    for n in range(5):
        pair.step(drawn(5,4,step=n))

@ranks(2, timeout=30)
def test_data_swapped(rank):
    pair = Pair(mlp(4, 8, 8, 2))
    for n in range(5):
        pair.step(drawn(5,4,step=n))
        if n == 2:
            for net, _ in pair.each():
                for p in net.parameters():
                    p.data = p.data.clone()

@ranks(2, timeout=30)
def test_state_read_everywhere(rank):
    pair = Pair(mlp(4, 8, 8, 2))
    for n in range(3):
        pair.step(drawn(5,4,step=n))
    for net, opt in pair.each():
        for p in net.parameters():
            opt.state[p]
    pair.optimizer.consolidate_state_dict(0)
    if rank == 0:
        a, b = pair.optimizer.state_dict(), pair.oracle.state_dict()
        assert a["param_groups"] == b["param_groups"]
        for k in b["state"]:
            assert_same_bits(a["state"][k], b["state"][k])

@ranks(2, timeout=30)
def test_bad_lr_then_good(rank):
    m = DistributedDataParallel(mlp(4, 8, 8, 2))
    with pytest.raises(ValueError):
        ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, lr=-1)
    ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, lr=1)

@ranks(2, timeout=30)
def test_frozen_passed(rank):
    def net():
        m = mlp(4, 8, 8, 2)
        m[0].requires_grad_(False)
        return m
    pair = Pair(net())
    for n in range(5):
        pair.step(drawn(5,4,step=n))

@ranks(2, timeout=30)
def test_frozen_unfrozen(rank):
    m = mlp(4, 8, 8, 2)
    m[0].requires_grad_(False)
    pair = Pair(m)
    for n in range(8):
        pair.step(drawn(5,4,step=n))
        if n == 3:
            for net, _ in pair.each(): net.module[0].requires_grad_(True)

@ranks(2, timeout=30)
def test_two_models_clip(rank):
    pairs = [Pair(mlp(4, 8, 8, 2)), Pair(mlp(4, 8, 2)), Pair(Squares(3))]
    for n in range(5):
        for pair in pairs[:2]:
            pair.step(drawn(5,4,step=n), between=lambda net, opt: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        pairs[2].step(between=lambda net, opt: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))

@ranks(2, timeout=30)
def test_clip_partly_replicated(rank):
    pair = Pair(mlp(4, 8, 2), params=lambda net: [net.module[0].weight])
    for n in range(5):
        pair.step(drawn(5,4,step=n), between=lambda net, opt: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
