"""Check that all configurations produce the same gradients, before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Case, loss
from benchmarks.models.configurations import UNWRAPPED, UNWRAPPED_AGAIN

STEPS = 3
TOLERANCE = 1e-5  # relative to the norm of a whole model's gradient


class WrongGradients(RuntimeError):
    """Gradients of two configurations differ; raised on all ranks."""


@dataclass(frozen=True)
class Agreement:
    """Comparison of the gradients of a configuration with the reference.

    Attributes:
        error: largest ``|this - reference| / |reference|`` of a whole model's gradient, in norms.
    """

    same_bits: bool  # in every checked step, and the same parameters have no gradient
    error: float
    same_on_all_ranks: bool  # bitwise, in every checked step


def check(
    models: dict[str, nn.Module],
    case: Case,
    ranks: Ranks,
    reference: str,
    alike: tuple[str, str],
    errors: Mapping[str, float] | None = None,
) -> dict[str, Agreement]:
    """Compare the gradients of all wrapped models with the reference, and between the ranks.

    Several steps run, each with a new batch: buckets are rebuilt after the first step, and stale
    gradients are detected.

    Args:
        models: models by configuration, all with the same parameters, including the unwrapped one.
        reference: the configuration with the expected gradients.
        alike: two models of one configuration. Differences between these, for example from atomic
            additions on a GPU, are not errors.
        errors: by configuration, tolerated differences that its wire format causes.

    Raises:
        WrongGradients: gradients differ by more than rounding. On the CPU with at most 2 ranks
            every bit must match.
    """
    exact = ranks.device.type == "cpu" and ranks.world_size <= 2
    names = list(dict.fromkeys((reference, *alike, *sorted(models))))
    found: dict[str, list[Agreement]] = {}
    problems: list[str] = []
    for step in range(STEPS):
        batch = case.batch(ranks.device, step * ranks.world_size + ranks.rank)
        expected = first = Gradient(torch.empty(0), torch.empty(0))
        tolerance = TOLERANCE
        for name in names:
            with _deterministic():
                loss(models[name], batch).backward()
            gradient = Gradient.of(models[name])
            models[name].zero_grad(set_to_none=True)
            if name == reference:
                expected = gradient
                if not (case.unused or expected.present.all()):
                    problems.append(f"step {step}: {name!r} left parameters without a gradient")
            if name == alike[0]:
                first = gradient
            elif name == alike[1]:
                tolerance = max(TOLERANCE, 4 * gradient.off(first))
            same_bits = gradient.equals(expected)
            if name in (UNWRAPPED.name, UNWRAPPED_AGAIN.name):
                if ranks.world_size > 1 and same_bits:
                    problems.append(f"step {step}: nothing was averaged, or all batches are equal")
                continue
            error = gradient.off(expected)
            one = Agreement(same_bits, error, gradient.same_on_all(ranks))
            found.setdefault(name, []).append(one)
            may_be_off = (errors or {}).get(name, 0.0)
            if not (same_bits or error <= may_be_off or (error <= tolerance and not exact)):
                problems.append(
                    f"step {step}: {name!r} is off {reference!r} by {error} of its norm"
                )
            if not one.same_on_all_ranks:
                problems.append(f"step {step}: gradients of {name!r} differ between ranks")
    everywhere = ranks.gathered(problems)
    if any(everywhere):
        raise WrongGradients(f"{case.name}: wrong gradients, nothing was timed: {everywhere}")
    return {
        name: Agreement(
            all(each.same_bits for each in steps),
            max(each.error for each in steps),
            all(each.same_on_all_ranks for each in steps),
        )
        for name, steps in found.items()
    }


@dataclass(frozen=True)
class Gradient:
    """All gradients of a model."""

    values: Tensor  # one vector; zeros for a parameter without a gradient
    present: Tensor  # for each parameter, whether it has a gradient

    @classmethod
    def of(cls, model: nn.Module) -> Gradient:
        params = list(model.parameters())
        values = torch.cat(
            [
                _whole(torch.zeros_like(param) if param.grad is None else param.grad).flatten()
                for param in params
            ]
        )
        present = [param.grad is not None for param in params]
        return cls(values.detach(), torch.tensor(present, device=values.device))

    def equals(self, other: Gradient) -> bool:
        """Return True if all bits match; NaN equals nothing."""
        return torch.equal(self.values, other.values) and torch.equal(self.present, other.present)

    def off(self, other: Gradient) -> float:
        """Return the relative norm of the difference; infinite if different parameters have one."""
        if self.equals(other):
            return 0.0
        if not torch.equal(self.present, other.present):
            return torch.inf
        return float((self.values - other.values).norm() / other.values.norm())

    def same_on_all(self, ranks: Ranks) -> bool:
        """Return True if this rank has the same bits as rank 0; collective."""
        values, present = self.values.clone(), self.present.to(torch.uint8)
        dist.broadcast(values, src=0)
        dist.broadcast(present, src=0)
        return self.equals(Gradient(values, present.bool()))


def _whole(gradient: Tensor) -> Tensor:
    """Gather the gradient from all ranks if FSDP2 has sharded it; collective."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make cuDNN add in a fixed order. It may be slower, so this is only for checks."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
