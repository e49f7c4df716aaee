"""Buckets in memory that NCCL has registered. (No GPU here: the recorded device plays it.)"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import ranks
from recording.programs import Program, play
from torch import Tensor, nn

from tritonddp import DistributedDataParallel
from tritonddp.buckets import formats

OPTION = {"transport": "registered_memory"}


@contextlib.contextmanager
def registering(allocate: Callable[[int], Tensor]) -> Iterator[None]:
    """Context: the process group allocates by this function, which all buckets share."""
    with mock.patch.object(formats, "registered_memory", return_value=allocate) as made:
        yield
    assert made.call_count <= 2, "one to see if there is some, one for the buckets"


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
@ranks(2, interprets=True)
def test_buckets_lie_in_it(options: dict) -> None:
    allocated: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        allocated.append(torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda"))
        return allocated[-1]

    usual = play(Program(options))
    with registering(allocate):
        found = play(Program({**OPTION, **options}, after=lambda net: nets.append(net)))
    net = nets.pop()
    nets.clear()
    assert not found.recorder.races, found.recorder.report()
    assert found.recorder.launches == usual.recorder.launches
    assert found.recorder.collectives == usual.recorder.collectives
    for one, other in zip(found.gradients, usual.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    places = {each.untyped_storage().data_ptr() for each in allocated}
    assert {each.flat.data.data_ptr() for each in net.reducer.buckets} <= places


nets: list[DistributedDataParallel] = []


@ranks(2)
def test_it_is_refused_where_the_group_has_none() -> None:
    for options, said in (
        ({}, "needs torch 2.9, NCCL and GPUs .* is gloo for 'cpu'"),
        ({"compression": "int8"}, "needs torch 2.9, NCCL"),
    ):
        with pytest.raises(ValueError, match=f"transport='registered_memory' {said}"):
            DistributedDataParallel(nn.Linear(2, 2), **OPTION, **options)
    with (
        registering(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)),
        pytest.raises(ValueError, match="compression has them summed otherwise"),
    ):
        DistributedDataParallel(nn.Linear(2, 2), **OPTION, compression="int8")


@ranks(2)
def test_all_ranks_hear_of_one_that_has_none(rank: int) -> None:
    has = registering(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    said = "rank 1 has ValueError: transport='registered_memory' needs"
    with has if rank == 0 else contextlib.nullcontext(), pytest.raises(RuntimeError, match=said):
        DistributedDataParallel(nn.Linear(2, 2), **OPTION)


def _backend(register: Callable[..., None] | None) -> Any:
    """Of a group that has registered memory; ``register`` registers a pool."""
    found = {} if register is None else {"register_mem_pool": register}
    return SimpleNamespace(supports_tensor_alloc=bool, mem_allocator="NCCL's", **found)


def test_the_pool_is_a_symmetric_window_before_it_has_memory() -> None:
    events: list[object] = []

    class Pool:
        def __init__(self, allocator: str) -> None:
            events.append(allocator)

    @contextlib.contextmanager
    def use(pool: Pool, device: torch.device) -> Iterator[None]:
        events.append((type(pool), device))
        yield

    def register(pool: Pool, symm: bool = False) -> None:
        events.append((type(pool), symm))

    def register_before_2_9(pool: Pool) -> None:
        raise AssertionError

    device = torch.device("cpu")
    with (
        mock.patch.object(torch.cuda, "MemPool", Pool),
        mock.patch.object(torch.cuda, "use_mem_pool", use),
    ):
        for registers in (register_before_2_9, None):
            group: Any = SimpleNamespace(_get_backend=lambda _, each=registers: _backend(each))
            assert formats.registered_memory(group, device) is None
        events.clear()
        group = SimpleNamespace(_get_backend=lambda _: _backend(register))
        allocate = formats.registered_memory(group, device)
        assert allocate is not None
        memory = allocate(12)
    assert (memory.dtype, memory.shape) == (torch.uint8, (12,))
    assert events == ["NCCL's", (Pool, True), (Pool, device)]
