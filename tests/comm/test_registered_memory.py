"""Buckets in memory that NCCL has registered, on the recorded device."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import assert_same_bits, ranks
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


def cpu_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@ranks(2, views=True, interprets=True)
def test_buckets_are_in_registered_memory(view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    allocated: list[Tensor] = []
    nets: list[DistributedDataParallel] = []

    def allocate(nbytes: int) -> Tensor:
        allocated.append(torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda"))
        return allocated[-1]

    usual = play(Program(options))
    with registering(allocate):
        found = play(Program(OPTION | options, after=nets.append))
    assert not found.recorder.races, found.recorder.report()
    assert found.recorder.launches == usual.recorder.launches
    assert found.recorder.collectives == usual.recorder.collectives
    assert_same_bits(found.gradients, usual.gradients, "gradients")
    places = {each.untyped_storage().data_ptr() for each in allocated}
    assert {each.flat.data.data_ptr() for each in nets[0].reducer.buckets} <= places


@ranks(2)
def test_errors_if_a_group_or_a_rank_has_no_registered_memory(rank: int) -> None:
    text = "transport='registered_memory' requires torch 2.9, NCCL, and .* uses gloo for 'cpu'"
    with pytest.raises(ValueError, match=text):
        DistributedDataParallel(nn.Linear(2, 2), **OPTION)
    with (
        registering(cpu_memory),
        pytest.raises(ValueError, match="compression are mutually exclusive"),
    ):
        DistributedDataParallel(nn.Linear(2, 2), **OPTION, compression="int8")
    text = "rank 1 has ValueError: transport='registered_memory' requires"
    has_memory = registering(cpu_memory) if rank == 0 else contextlib.nullcontext()
    with has_memory, pytest.raises(RuntimeError, match=text):
        DistributedDataParallel(nn.Linear(2, 2), **OPTION)


def group_with(**methods: Any) -> Any:
    """A process group whose backend can allocate memory."""
    backend = SimpleNamespace(supports_tensor_alloc=bool, mem_allocator="NCCL's", **methods)
    return SimpleNamespace(_get_backend=lambda _: backend)


def test_the_pool_is_registered_as_a_symmetric_window_before_it_allocates() -> None:
    device, cuda, calls = torch.device("cpu"), mock.MagicMock(), mock.MagicMock()

    def register(pool: Any, symm: bool = False) -> None:
        cuda.register(pool, symm)

    with mock.patch.multiple(torch.cuda, MemPool=cuda.MemPool, use_mem_pool=cuda.use):
        before_2_9 = group_with(register_mem_pool=lambda pool: calls())
        for group in (before_2_9, group_with()):
            assert formats.registered_memory(group, device) is None
        assert not calls.called
        cuda.reset_mock()
        allocate = formats.registered_memory(group_with(register_mem_pool=register), device)
        assert allocate is not None
        memory = allocate(12)
    assert (memory.dtype, memory.shape) == (torch.uint8, (12,))
    pool, expected = cuda.MemPool.return_value, mock.call
    order = [expected.MemPool("NCCL's"), expected.register(pool, True), expected.use(pool, device)]
    assert cuda.mock_calls[:3] == order
