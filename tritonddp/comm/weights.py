"""Weights of ranks in a mean: factors of the gradients before and after the sum."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonddp.coordination.agreement import (
    SOURCE,
    Agreement,
    Disagreement,
    GradSource,
    HeaderField,
    differ,
    in_words,
)

# Unit of weights in the first weighted reduction, when no weight is known to all ranks yet. A few
# samples and several thousand tokens both differ from it by a factor below 1000, which the range of
# fp16 allows.
_FIRST_UNIT = 16.0


@dataclass(frozen=True)
class Weight:
    """Weight of the gradients of a rank."""

    items: float  # number of items over which the loss is a mean or a sum
    is_sum: bool = False  # the loss is a sum, so its gradients are not multiplied by `items`

    @property
    def scale(self) -> float:
        """Factor of this rank's gradients. For a sum over no items it is 1."""
        return 1.0 if self.is_sum and not self.items else self.items


# The weight of a rank without gradients.
NOTHING = Weight(0.0)


class Weights(HeaderField):
    """The weight of a rank: a :class:`Weight`, or ``None`` if the mean is not weighted.

    A rank without gradients sends 0: it does not know whether the other ranks use weights.

    Attributes:
        divisor: divisor of the sum over ranks; by default the number of ranks, in which case
            :attr:`is_mean` is true.
        unit: weights are divided by it before the sum; close to the last weights that all ranks
            know.
    """

    size = 8  # fp64, NaN without a weight

    def __init__(self, world_size: int, divide_factor: float | None = None) -> None:
        self._ranks = world_size
        self.divisor = world_size if divide_factor is None else divide_factor
        self.is_mean = divide_factor is None
        self.unit = _FIRST_UNIT

    def set_unit(self, unit: float) -> None:
        """Continue with the :attr:`unit` of an earlier run."""
        self.unit = unit

    def encode(self, value: Weight | None) -> bytes:
        return struct.pack("<d", math.nan if value is None else value.items)

    def decode(self, encoded: bytes) -> float:
        weight: float = struct.unpack("<d", encoded)[0]
        return weight

    def is_steady(self, value: Weight | None) -> bool:
        return value is None

    def check(self, values: Mapping[int, float], whole: Mapping[int, float], mine: Any) -> None:
        if differ({rank: math.isnan(each) for rank, each in whole.items()}):
            words = {
                rank: "no weight" if math.isnan(each) else f"weight {each:g}"
                for rank, each in whole.items()
            }
            raise Disagreement(
                f"only some ranks use a weighted mean: {in_words(words)}. Run the backward inside "
                "weighted(n) on all ranks or on none"
            )

    def read(self, values: Mapping[int, float]) -> None:
        # A power of two near the mean of the weights: dividing by it is exact, and the quotients do
        # not overflow if gradients are sent in fp16.
        if weights := [each for each in values.values() if each > 0]:
            self.unit = 2.0 ** round(math.log2(sum(weights) / len(weights)))

    def factor(self, agreement: Agreement, headers: Tensor, over_present: bool) -> Tensor | None:
        """Return the fp64 ``(1,)`` factor of the sum, from the headers; ``None`` for 1.

        With ``over_present`` an unweighted mean is over the ranks that still have inputs. The ranks
        agree on that when a forward inside ``join()`` begins.
        """
        sent, factor = agreement.sent.values, None
        if over_present:
            have_inputs = agreement.column(headers, SOURCE) != GradSource.JOINED
            factor = (self._ranks / have_inputs.sum().to(torch.float64)).view(1)
        if sent[self] is None:
            return factor
        weights = agreement.column(headers, self).to(torch.uint8).reshape(-1).view(torch.float64)
        total = weights.sum().view(1)
        # If all weights are zero, the mean must be zero.
        weighted = torch.where(total == 0, total, self._ranks * self.unit / total)
        if sent[SOURCE].is_empty:  # the other ranks may use no weights
            factor = torch.ones_like(total) if factor is None else factor
            weighted = torch.where(total.isnan(), factor, weighted)
        return weighted
