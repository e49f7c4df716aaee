"""What a wrapper knows that its module does not, for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


class CommState:
    """The part of ``DistributedDataParallel`` that lets a run go on with the same bits.

    Which bits a sum over three and more ranks has depends on where in its bucket an element lies:
    gloo's and NCCL's rings begin to add at another rank in each part of the message. A wrapper
    that is new observes the order of gradients in its first step, with other buckets than it has
    from the second on. So its first step is not the one that the run before it would have made.
    """

    if TYPE_CHECKING:
        process_group: dist.ProcessGroup
        reducer: Reducer

    def comm_state_dict(self) -> dict[str, Any]:
        """What to save beside the module, so that a new wrapper goes on with the same bits.

        All ranks call it, between two steps, and each saves what it gets.

        Returns:
            ``rank`` and ``world_size`` of this run, and, alike on all ranks: ``bucket_order``,
            names of parameters as buckets hold them, empty before the first reduced backward;
            ``reductions_since_change``, since a parameter was frozen, unfrozen or added;
            ``weight_unit``, by which the next weights are divided; and ``wires``, what
            ``compression="auto"`` has chosen for each bucket, as numbers. And of this rank, with
            ``compression``: ``sent`` and ``reduced``, what quantisation has left out of its
            gradients, and of those sums that it owns, by parameter, fp32, in its shape.

        Raises:
            RuntimeError: a backward waits for ``finalize_backward()``.

        Example::

            torch.save({"model": model.module.state_dict(), "comm": model.comm_state_dict()}, path)
        """
        return {
            "rank": self.process_group.rank(),
            "world_size": self.process_group.size(),
            **self.reducer.comm_state(),
        }

    def load_comm_state_dict(self, *states: dict[str, Any]) -> None:
        """Go on as the run did whose state this is: the next step has the bits of its next step.

        All ranks call it, between two steps, once the module has the parameters of that run, frozen
        ones included. One small all-reduce.

        Args:
            states: what :meth:`comm_state_dict` returned: on as many ranks as then, each rank's
                own. On fewer or more ranks those of all saved ranks ``r`` for which
                ``r % world_size`` is this rank, which may be none: what was left out of their
                gradients is added up. Parameters that the module does not have are passed over;
                trainable ones that a state does not name go last.

        Raises:
            RuntimeError: a backward is under way, or waits for ``finalize_backward()``; or a state
                of another rank is none. Whichever rank it is, nothing is loaded on any.
            TypeError: a state is no dictionary, or an entry is of another type than it was.
            ValueError: an entry is missing or out of range; or a parameter had another shape, and
                something was left out of its gradients.
        """
        failure: Exception | None = None
        try:
            for state in states:
                _check(state)
        except (TypeError, ValueError) as error:
            failure = error
        self.reducer.load_comm_state(states, failure)


def _check(state: Any) -> None:
    """Is this what ``comm_state_dict()`` returns? Before anything is changed.

    Raises:
        TypeError, ValueError: it is not.
    """
    what = "load_comm_state_dict() takes what comm_state_dict() returned"
    if not isinstance(state, Mapping):
        raise TypeError(f"{what}, got {state!r}")
    order, wires = state.get("bucket_order"), state.get("wires")
    for name, entry, kind in (("bucket_order", order, str), ("wires", wires, int)):
        if not isinstance(entry, list) or not all(isinstance(each, kind) for each in entry):
            raise TypeError(f"{what}, but {name!r} is no list of {kind.__name__}: {entry!r}")
    if len({*(order or ())}) < len(order or ()):
        raise ValueError(f"{what}, but 'bucket_order' names a parameter twice: {order!r}")
    for name, least in (("reductions_since_change", 0.0), ("weight_unit", math.ulp(0.0))):
        number = state.get(name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{what}, but {name!r} is no number: {number!r}")
        if not least <= number < 2.0**53:  # an integer that fp64 tells from the next
            raise ValueError(f"{what}, but {name!r} is {number!r}")
    for name in ("sent", "reduced"):
        kept = state.get(name, {})
        if not isinstance(kept, Mapping) or not all(map(_is_dense, kept.values())):
            raise TypeError(
                f"{what}, but {name!r} is no dictionary of dense tensors of floating point"
            )


def _is_dense(left: Any) -> bool:
    """Whether this is what is left out of a gradient: others raise where they are added."""
    return (
        isinstance(left, Tensor)
        and left.is_floating_point()
        and left.layout is torch.strided
        and not left.is_meta
    )
