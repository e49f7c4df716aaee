"""Large gradients are reduced where they lie: on the recorded device, beside ordinary buckets."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import ranks
from torch import Tensor, nn

from recording.device import recording
from recording.programs import PROGRAMS, play
from tritonddp import DistributedDataParallel
from tritonddp.buckets import in_place_bucket

LARGE = 128  # bytes: weights of the programs, and no biases


@contextlib.contextmanager
def limit(nbytes: int) -> Iterator[None]:
    with mock.patch.object(in_place_bucket, "LARGE", nbytes):
        yield


def in_place_of(net: DistributedDataParallel) -> list[bool]:
    return [bucket.is_in_place for bucket in net.reducer.buckets]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "elsewhere"])
@pytest.mark.parametrize("name", list(PROGRAMS))
@ranks(2, interprets=True)
def test_gradients_have_the_bits_of_ordinary_buckets(name: str, elsewhere: bool) -> None:
    ordinary = play(PROGRAMS[name], elsewhere=elsewhere)
    with limit(LARGE):
        played = play(PROGRAMS[name], elsewhere=elsewhere)
    assert not played.recorder.races, played.recorder.report()
    assert not played.recorder.rounded, played.recorder.rounded
    assert len(played.gradients) == len(ordinary.gradients)
    for one, other in zip(played.gradients, ordinary.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
