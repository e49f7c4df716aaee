"""Small buckets go over NVLink: which, with which bits, and where all ranks refuse alike.

On the recorded device. That its order is right say the planted faults and the random programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from as_on_gpu import interpreting_ranks
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from recording.device import recording
from recording.programs import CAP, PROGRAMS, Program, play
from tritonddp import DistributedDataParallel, _torch
from tritonddp.comm import symmetric_memory
from tritonddp.coordination.counters import Counters

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def _interpreting() -> Iterator[None]:
    with interpreting_ranks():
        yield


def net(transport: str = "peer_memory", module: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    return DistributedDataParallel(module.to("cuda"), transport=transport, bucket_cap_mb=CAP)


def step(ddp: Any, scale: float = 1.0) -> None:
    ddp.zero_grad()
    x = torch.full((3, 6), 1.0 + dist.get_rank()).to("cuda")
    (scale * ddp(x).sum()).backward()


def is_shared(ddp: Any) -> list[bool]:
    return [bucket.exchange is not None for bucket in ddp._ddp_state.core.manager.current.buckets]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
@ranks(2, 3)
def test_the_sums_are_those_of_the_process_group(options: dict[str, Any]) -> None:
    """At two ranks bit by bit: there is but one order to add two numbers in."""
    found = [play(Program(options | {"transport": t}), steps=4) for t in ("peer_memory", "auto")]
    over_nvlink, plain = found
    assert not over_nvlink.recorder.races, over_nvlink.recorder.report()
    assert over_nvlink.recorder.launches["reduce_unflatten"] == over_nvlink.buckets
    assert not plain.recorder.launches["reduce_unflatten"]
    assert_same_on_all_ranks(over_nvlink.gradients, "gradients")
    if dist.get_world_size() == 2:
        assert_same_bits(over_nvlink.gradients, plain.gradients)
    for one, other in zip(over_nvlink.gradients, plain.gradients, strict=True):
        scale = 2e-2 if options else 1e-6
        torch.testing.assert_close(one, other, rtol=scale, atol=scale)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.phase = nn.Linear(6, 4), nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * (self.phase * self.phase * (1 + 2j)).real.sum()


@ranks(2)
def test_complex_gradients_are_summed_too() -> None:
    found = []
    for transport in ("auto", "peer_memory"):
        with recording() as recorder:
            ddp = net(transport, _Complex())
            for _ in range(3):
                step(ddp)
            found.append([param.grad.cpu().clone() for param in ddp.parameters()])
            assert is_shared(ddp) == [transport == "peer_memory"] * 2
            torch.cuda.synchronize()
        assert not recorder.races, recorder.report()
    assert_same_bits(*found)


@ranks(2)
def test_large_buckets_go_over_nccl_in_the_same_order() -> None:
    with mock.patch.object(symmetric_memory, "_LARGEST", 500):
        played = play(PROGRAMS["NVLink"], steps=4)
    assert not played.recorder.races, played.recorder.report()
    launches = played.recorder.launches
    assert played.recorder.collectives.total() == launches["reduce_unflatten"] == 1
    assert launches["barrier"] == 2  # before the sum, and behind the last one
    with mock.patch.object(symmetric_memory, "_LARGEST", 0):
        none = play(PROGRAMS["NVLink"], steps=4)
    assert not none.recorder.launches["barrier"]
    assert_same_bits(none.gradients, played.gradients)


@ranks(2)
def test_a_run_has_one_barrier_a_bucket_and_one_more() -> None:
    played = play(PROGRAMS["NVLink"], steps=4)
    assert played.recorder.launches["barrier"] == played.buckets + 1 == 3
    left_out = play(PROGRAMS["NVLink, left-out buckets"], steps=4)
    launched = left_out.recorder.launches["reduce_unflatten"]
    assert 0 < launched < left_out.buckets
    assert left_out.recorder.launches["barrier"] == launched + 1


@ranks(2)
def test_a_communication_hook_takes_its_buckets_back() -> None:
    with recording() as recorder:
        ddp = net()
        step(ddp)
        step(ddp)
        assert all(is_shared(ddp))
        expected = [2 * param.grad.cpu() for param in ddp.parameters()]
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        assert not any(is_shared(ddp))
        recorder.step_begins()
        step(ddp, 2.0)
        assert not recorder.launches["barrier"]
        torch.testing.assert_close(
            [param.grad.cpu() for param in ddp.parameters()], expected, rtol=1e-6, atol=1e-6
        )
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()


# Refusals


def _raising(text: str) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise RuntimeError(text)

    return fail


# What rank 1 finds, and what all say.
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({"symmetric_memory_lack": lambda _: "torch lacks it"}, "rank 1: torch lacks it"),
    "no NVML": (
        {"nvlinks": _raising("no detector")},
        "rank 1: its NVLinks cannot be queried: no detector",
    ),
    "another host": (
        {"_BOOT_ID": SimpleNamespace(read_text=lambda: "another")},
        "ranks 0 and 1 are on different hosts",
    ),
    "one card": ({}, "ranks 0 and 1 both have their parameters on cuda:0: .*unset CUDA_VISIBLE"),
    "PCIe": (
        {"nvlinks": lambda _: [0, 0, 0]},
        "there is no NVLink between the GPUs of ranks 1 and 0",
    ),
    "few cards": (
        {"nvlinks": lambda _: []},
        "there is no NVLink between the GPUs of ranks 1 and 0",
    ),
    "no memory": (
        {"symmetric_empty": _raising("out of memory")},
        r"rank 1: \d+ bytes cannot be allocated: out of memory",
    ),
    "no mapping": (
        {"symmetric_rendezvous": _raising("invalid device ordinal")},
        "rank 1: the memory of the other ranks cannot be mapped: invalid device ordinal",
    ),
}


@pytest.mark.parametrize("how", REFUSALS)
@ranks(3)
def test_where_one_rank_cannot_all_say_the_same(how: str) -> None:
    found, why = REFUSALS[how]
    introduce = symmetric_memory._introduction
    with recording() as recorder, contextlib.ExitStack() as stack:
        if how == "one card":
            found = {"_introduction": introduce}
        if how == "no mapping":  # which nobody waits for in vain here
            rendezvous = {"symmetric_rendezvous": lambda *_: None}
            stack.enter_context(mock.patch.multiple(symmetric_memory, **rendezvous))
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.multiple(symmetric_memory, **found))
        ddp = net()
        with pytest.raises(RuntimeError, match=f"over NVLink: {why}.* transport='auto'") as said:
            step(ddp)
        (told,) = set(gather(str(said.value).partition("NVLink: ")[2]))
        assert told
        for _ in range(2):  # through the process group
            step(ddp)
        assert not any(is_shared(ddp))
        assert_same_on_all_ranks([param.grad.cpu() for param in ddp.parameters()], "gradients")
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()


def test_parameters_on_several_cards_are_refused() -> None:
    said = symmetric_memory._introduction({CUDA, torch.device("cuda", 1)})
    assert symmetric_memory._refusal([said]) == "rank 0: its parameters are on 2 devices"


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("CUDA", ""),
        ("NVSHMEM", "torch's symmetric memory is NVSHMEM's, not CUDA's"),
        (None, "was built without symmetric memory for cuda"),
    ],
)
def test_what_torch_lacks_is_said(backend: str | None, why: str) -> None:
    kind = "torch._C._distributed_c10d._SymmetricMemory"
    with mock.patch(kind) as fake:
        fake.get_backend.return_value = backend
        said = _torch.symmetric_memory_lack(CUDA)
        assert said.endswith(why)
        assert bool(said) == bool(why)
        with mock.patch.object(torch.version, "hip", "6.4"):
            assert "ROCm" in _torch.symmetric_memory_lack(CUDA)
    with mock.patch(kind, object()):
        assert _torch.symmetric_memory_lack(CUDA).endswith("has no symmetric memory")


def test_what_is_asked_of_torch_it_understands() -> None:
    """Here, without a card, by its errors: they are not of names or arguments."""
    if torch.cuda.is_available():
        pytest.skip("there is a card, for tests/gpu")
    for ask in (_torch.nvlinks, lambda device: _torch.symmetric_empty(256, device)):
        with pytest.raises(RuntimeError):
            ask(CUDA)
    connectivity = SimpleNamespace(matrix=[[0, 18], [18, 0]])
    detect = "torch._C._distributed_c10d._detect_dma_connectivity"
    with mock.patch(detect, return_value=connectivity):
        assert _torch.nvlinks(CUDA) == [0, 18]


@ranks(2)
def test_rendezvous_is_asked_of_the_ranks_of_a_group() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)symm|device"):
        _torch.symmetric_rendezvous(torch.zeros(256, dtype=torch.uint8), dist.group.WORLD)


def test_a_sum_that_fails_is_explained() -> None:
    run, bucket = mock.Mock(skipped=(), works=[], is_logged=True), mock.Mock(index=0, nbytes=8)
    bucket.exchange.module.indices = [0]
    bucket.exchange.launch.side_effect = RuntimeError("CUDA error")
    run.explain.return_value = RuntimeError("bucket 0: CUDA error")
    transport = symmetric_memory.SymmetricMemory(mock.Mock(), mock.Mock(), Counters())
    with pytest.raises(RuntimeError, match="bucket 0: CUDA error"):
        transport.launch(run, bucket, is_broken=True)
    run.log.assert_called_once_with(bucket, "is summed over NVLink with NaN")
    assert not run.works


@ranks(2)
def test_auto_is_the_process_group_and_another_group_than_nccl_is_an_error() -> None:
    with recording():
        ddp = net("auto")
        step(ddp)
        assert ddp._ddp_state.core.peer_memory is None
        torch.cuda.synchronize()
        with (
            mock.patch("tritonddp.config.backend_name", return_value="gloo"),
            pytest.raises(
                ValueError, match=r"or parameters on GPUs and one of NCCL, but .* 'cuda'"
            ),
        ):
            net()
