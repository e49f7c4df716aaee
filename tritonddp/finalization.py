"""The caller says when reduced gradients are waited for (manual finalisation, torch 2.15)."""

from __future__ import annotations

from typing import Any

from tritonddp.config import check_flags


class Finalizes:
    """The part of ``DistributedDataParallel`` that lets a caller end reductions itself.

    So that other work goes on while gradients are on their way::

        model.require_manual_backward_finalization = True
        loss = criterion(model(inputs), targets)
        loss.backward()  # the all-reduces go on
        ...
        model.finalize_backward()  # now .grad holds the means
        optimizer.step()
    """

    reducer: Any
    logger: Any
    _require_manual_backward_finalization = False

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether reduced backwards leave ``.grad`` to :meth:`finalize_backward`. Off by default.

        May be set whenever no backward waits for its end.

        Raises:
            RuntimeError: when set, if one does.
            TypeError: when set to something that is not on or off.
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        check_flags({"require_manual_backward_finalization": required})
        self.reducer.finalize_on_request(required)
        self._require_manual_backward_finalization = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the next backward has to return before :meth:`finalize_backward` may be called.

        True for the first reduced backward, in which the order of buckets is not known yet; after
        that it may be called from a hook too. Always false if finalisation is not manual.
        """
        return self._require_manual_backward_finalization and self.reducer.launches_at_end

    def finalize_backward(self) -> None:
        """Wait for the reductions of the last backward, and bring their results into ``.grad``.

        Once for each reduced backward, after it has returned; or from a hook of it, when all
        buckets have been launched (see :attr:`should_finalize_after_backward`).

        Raises:
            RuntimeError: :attr:`require_manual_backward_finalization` is off, buckets still wait
                for gradients, or there is nothing to wait for, as under ``no_sync``.
        """
        self.reducer.finalize_backward()
        self.logger.sampler.finalized()
