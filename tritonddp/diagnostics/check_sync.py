"""Verify that all ranks hold bitwise identical parameters, buffers and gradients.

If they do, this takes two collectives for any number of ranks: an all-gather of 56 bytes, which
compares names and shapes, and an all-reduce (maximum) of 16 to 24 bytes per tensor. For each tensor
it reduces the checksum ``c`` and the complement ``~c``: the maximum of ``c`` is the greatest
checksum of all ranks, and the complement of the maximum of ``~c`` is the least. If both are equal,
all checksums are equal. One hash of all checksums would be smaller, but could not tell which
tensors differ. If one rank expects a tensor to differ, it is excluded on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonddp._torch import running_statistics
from tritonddp.buckets.ignored import Ignored
from tritonddp.coordination.collectives import all_gather, all_reduce
from tritonddp.coordination.failures import rank_list
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import describe, plain_tensors, verify_same
from tritonddp.diagnostics.checksum import checksums
from tritonddp.reducer.autograd_driver import AutogradDriver

# Maximum numbers of tensors in an error message, and of contents per tensor; the rest is counted.
_SHOWN = 10
_CONTENTS = 4


@dataclass(frozen=True)
class _Item:
    """A tensor that is compared."""

    kind: str  # "parameter", "buffer" or "gradient"
    name: str
    tensor: Tensor | None  # None for a missing gradient
    like: Tensor  # has the same shape and dtype; the parameter for a gradient
    is_local: bool = False  # this rank expects it to differ between ranks


def check_sync(
    module: nn.Module,
    driver: AutogradDriver,
    ignored: Ignored,
    buffers: bool | None,
    gradients: bool | None,
) -> None:
    """See ``DistributedDataParallel.check_sync()``. Tensors in ``ignored`` are excluded."""
    for name, value in (("buffers", buffers), ("gradients", gradients)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} should be True, False or None, got {value!r}")
    reduced = driver.reduced_parameters()
    group, device = driver.group, driver.manager.current.params[0].device
    where = f"{driver.where()}, check_sync()"
    # A module under tensor parallelism may hold other tensors in place of its parameters.
    params = ignored.parameters(module)
    held = [] if buffers is False else ignored.buffers(module)
    if buffers is None and not driver.parameters.ignored.syncs_buffers:
        held = []  # each rank keeps its own buffers
    own = _of_own_batches(module, group) if buffers is None else []
    what = f"{buffers}, without {own}" if own else buffers
    compared = {"buffers": what, "gradients": gradients}
    tensors = plain_tensors(params)
    verify_same(describe([*params, *tensors], held, compared), group, device, where)
    items = [_Item("parameter", name, tensor, tensor) for name, tensor in tensors]
    items += [_Item("buffer", name, each, each) for name, each in held if name not in own]
    if gradients is not False:
        items += [
            _Item("gradient", name, param.grad, param, gradients is None and param not in reduced)
            for name, param in params
            if gradients or param.requires_grad
        ]
    sums = checksums([item.tensor for item in items])
    with group.guard(where, f"comparison of {len(items)} checksums"):
        differing = _differing(items, sums, group, device)
        if not differing:
            return
        lines = _lines(items, sums, differing, group, device)
    kinds, all_kinds = ([items[n].kind for n in of] for of in (differing, range(len(items))))
    lines += [remedy for kind, remedy in _REMEDIES.items() if kind in kinds]
    counts = [
        f"{kinds.count(kind)} of {all_kinds.count(kind)} {kind}s"
        for kind in dict.fromkeys(all_kinds)
    ]
    heading = f"{where}: values differ between ranks ({', '.join(counts)}):"
    raise RuntimeError("\n".join([heading, *lines]))


def _of_own_batches(module: nn.Module, group: Group) -> list[str]:
    """Return the names of buffers that the forwards of each rank update with its own batches."""
    found = []
    for prefix, layer in module.named_modules():
        names = running_statistics(layer)
        if isinstance(layer, nn.SyncBatchNorm) and _spans(layer.process_group, group.process_group):
            continue
        found += [f"{prefix}.{name}" if prefix else name for name in names]
    return found


def _spans(wide: dist.ProcessGroup | None, group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of ``group`` are in ``wide``; ``None`` is the default group."""
    try:
        ranks = set(dist.get_process_group_ranks(group))
        return wide is None or ranks <= set(dist.get_process_group_ranks(wide))
    except KeyError:  # torch has not registered the group: its global ranks are unknown
        return wide is group


def _differing(
    items: Sequence[_Item], sums: Sequence[int], group: Group, device: torch.device
) -> list[int]:
    """Return the indices of items that differ between ranks and should not."""
    gradients = [number for number, item in enumerate(items) if item.kind == "gradient"]
    local = [int(items[number].is_local) for number in gradients]
    message = torch.tensor([*sums, *(~each for each in sums), *local], device=device)
    all_reduce(message, group.process_group, dist.ReduceOp.MAX).wait()
    *found, local = (part.tolist() for part in message.split([len(items)] * 2 + [len(gradients)]))
    may_differ = {number for number, is_local in zip(gradients, local, strict=True) if is_local}
    return [
        number
        for number, (greatest, complement) in enumerate(zip(*found, strict=True))
        if greatest != ~complement and number not in may_differ
    ]


def _lines(
    items: Sequence[_Item],
    sums: Sequence[int],
    differing: Sequence[int],
    group: Group,
    device: torch.device,
) -> list[str]:
    """Describe which ranks hold which values of the items ``differing``, one item per line."""
    shown = [(items[number], sums[number]) for number in differing[:_SHOWN]]
    lines = [
        f"  {item.kind} {item.name!r} {tuple(item.like.shape)} {item.like.dtype}: {content}"
        for (item, _), content in zip(shown, _by_content(shown, group, device), strict=True)
    ]
    if more := len(differing) - len(shown):
        lines.append(f"  ... and {more} more")
    return lines


def _by_content(
    shown: Sequence[tuple[_Item, int]], group: Group, device: torch.device
) -> list[str]:
    """Describe which ranks hold which value of each item, given with its local checksum."""
    sums = torch.tensor([checksum for _, checksum in shown], device="cpu")
    norms = torch.tensor(
        [_norm(item.tensor) for item, _ in shown], dtype=torch.float64, device="cpu"
    )
    message = torch.stack([sums, norms.view(torch.int64)]).to(device)
    ranks = []
    for each in all_gather(message, group.process_group):
        sums, norms = each.cpu()
        ranks.append(zip(sums.tolist(), norms.view(torch.float64).tolist(), strict=True))
    return [_in_words(contents, group) for contents in zip(*ranks, strict=True)]


def _norm(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    if tensor.dtype is torch.float4_e2m1fn_x2:  # torch cannot convert it to another dtype
        tensor = tensor.view(torch.uint8)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    with torch.no_grad():
        return torch.linalg.vector_norm(tensor.to_dense().to(wide)).item()


def _in_words(contents: Sequence[tuple[int, float]], group: Group) -> str:
    """Describe which ranks hold which value, the rarest value first.

    ``contents`` are the checksum and the norm on each rank, both 0 for a missing gradient.
    """
    holders: dict[int, list[int]] = {}
    for rank, (checksum, _) in enumerate(contents):
        holders.setdefault(checksum, []).append(rank)
    shares = sorted(holders.values(), key=lambda ranks: (len(ranks), ranks))
    texts = []
    for ranks in shares[:_CONTENTS]:
        checksum, norm = contents[ranks[0]]
        what = f"norm {norm:.9g} (checksum {checksum % 2**64:016x})" if checksum else "none"
        who = rank_list(ranks, group.process_group)
        texts.append(f"{who} {'has' if len(ranks) == 1 else 'have'} {what}")
    if more := shares[_CONTENTS:]:
        texts.append(f"{sum(map(len, more))} more ranks have {len(more)} other values")
    return "; ".join(texts)


_REMEDIES = {
    "parameter": "Parameters stay identical if all ranks start with the same parameters, and the "
    "same optimizer applies the same steps with the same gradients. Look for code that only some "
    "ranks run, such as a skipped step, a loaded checkpoint or rank-local random numbers.",
    "buffer": "Buffers that forwards update with local batches differ until they are "
    "synchronized. If this is intended, call check_sync(buffers=False).",
    "gradient": "Gradients are identical from the end of a reduced backward until some ranks "
    "change .grad. Compare them before modifying them, or call check_sync(gradients=False).",
}
