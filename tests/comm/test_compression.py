"""``compression``: quantized gradients, with real ranks over gloo."""

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import linears
from oracle import mean_over_ranks, one_per_rank, play
from quantized_ranks import Simulated
from torch import Tensor, nn
from training import HEADER_BYTES, assert_gradients_alike, counted, gradients, train_step

from tritonddp import DistributedDataParallel, Int8
from tritonddp.buckets.residuals import residuals_of


@pytest.mark.parametrize("feedback", [True, False])
@ranks(2, 3)
def test_gradients_have_the_bits_of_one_process(feedback: bool) -> None:
    """Each parameter is quantized separately: its bucket makes no difference."""
    size = dist.get_world_size()
    module = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), *linears(60, 40, 3))
    alone = one_per_rank(module)
    quantized = {"0.weight", "2.weight"}
    options = {"world_size": size, "feedback": feedback, "is_direct": size == 2}
    simulated = Simulated(module.named_parameters(), quantized, **options)
    wire = Int8(error_feedback=feedback)
    ddp = DistributedDataParallel(module, compression=wire, bucket_cap_mb=0.005)
    assert len(ddp.reducer.buckets) == 2
    for step in range(4):
        play(lambda net, _: train_step(net, torch.randn(8, 50)), ddp, alone, step)
        assert_same_bits(gradients(ddp), simulated.means([*map(gradients, alone)]), f"step {step}")
        assert_gradients_alike(ddp, f"step {step}")


@ranks(2, 4)
def test_launches_collectives_and_bytes() -> None:
    size = dist.get_world_size()
    ddp = DistributedDataParallel(linears(*[64] * 7), compression="int8", bucket_cap_mb=0.03)
    for _ in range(4):
        with counted(ddp) as found:
            train_step(ddp, torch.randn(4, 64))
    buckets = ddp.reducer.buckets
    assert len(buckets) == 3
    # Two ranks exchange directly: there is nothing to send after that.
    parts, collectives = (1, 1) if size == 2 else (size, 2)
    assert found.collectives == collectives * len(buckets)
    assert found.flattens == found.unflattens == len(buckets)
    handed, sent = 0, 0
    for bucket in buckets:
        # Two weights of 16 blocks and two biases of 64: for each rank its part, or all.
        part = (32 * 256 + 32 * 4 + 128 * 4) // parts
        trailer = 16 * -(-(4 + (HEADER_BYTES if bucket.index == 0 else 0)) // 16)
        gathered = 0 if size == 2 else part
        assert bucket.nbytes == size * (part + trailer) + size * gathered
        handed += bucket.nbytes
        sent += (size - 1) * (part + trailer) + (size - 1) * gathered
    assert (found.wire_bytes, found.sent_bytes) == (handed, sent)


class Kinds(nn.Module):
    """Parameters of several sizes, dtypes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.matrix = nn.Linear(32, 40)
        self.head = nn.Linear(40, 40)
        self.body = nn.Linear(40, 40)
        self.small = nn.Linear(40, 25, bias=False)  # 1,000 elements
        self.wide = nn.Linear(40, 40).double()
        self.low = nn.Linear(40, 40).bfloat16()
        self.phase = nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.head(self.matrix(self.table(tokens))))
        x = self.small(x).sum() + self.wide(x.double()).sum() + self.phase.abs().sum()
        return x + self.low(torch.ones(40, dtype=torch.bfloat16)).sum()


@ranks(2)
def test_which_parameters_are_quantized() -> None:
    names = {"matrix.weight", "head.weight", "body.weight", "low.weight"}
    for exact, kept in (
        (None, set()),
        ("head.weight", {"head.weight"}),
        (["head.*", "matrix.weight"], {"head.weight", "matrix.weight"}),
        (lambda name, p: name == "body.weight" and p.shape == (40, 40), {"body.weight"}),
    ):
        torch.manual_seed(0)
        module = Kinds()
        alone = one_per_rank(module)
        ddp = DistributedDataParallel(module, compression=Int8(exact=exact))
        quantized = names - kept
        play(lambda net, _: net(torch.randint(100, (4,))).abs().backward(), ddp, alone, 0)
        assert {name for name, _, _ in residuals_of(ddp.reducer.buckets)} == quantized
        means = mean_over_ranks(alone)
        for (name, param), mean in zip(module.named_parameters(), means, strict=True):
            assert param.grad.dtype == param.dtype
            if name not in quantized:
                tolerance = 1e-5 * float(mean.abs().max())
                torch.testing.assert_close(param.grad, mean, rtol=0, atol=tolerance, msg=name)
    # One bucket for each dtype: three in which something is exact take two collectives, no more.
    kinds = [bucket.quantization is None for bucket in ddp.reducer.buckets]
    assert sorted(kinds) == [False, False, True, True]


@ranks(2)
def test_errors_of_the_options() -> None:
    with pytest.raises(TypeError, match=r"error_feedback should be True or False, got 'no'"):
        Int8(error_feedback="no")
    for exact in (3, b"head", ["head", 3]):
        with pytest.raises(TypeError, match="exact should be a name, a pattern"):
            Int8(exact=exact)
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    with pytest.raises(RuntimeError, match="compression and a communication hook"):
        ddp.register_comm_hook(None, lambda state, bucket: None)
    train_step(ddp, torch.randn(4, 64))
