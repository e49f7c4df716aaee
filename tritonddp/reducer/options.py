"""What users and features ask of a reducer after it was made."""

from __future__ import annotations

from typing import Any, NoReturn

from tritonddp.buckets.formats import Int8
from tritonddp.comm.comm_hook import Hook
from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.graph.backward import UNFINALIZED, Backward


def refuse_compiled_autograd(where: str) -> NoReturn:
    """Raise a RuntimeError: compiled autograd runs the backward."""
    raise RuntimeError(
        f"{where}: Compiled autograd is not compatible with tritonddp, whose hooks need autograd's "
        "own engine: leave torch._dynamo.config.compiled_autograd at False. torch.compile does not "
        "need it to compile a forward."
    )


class ReducerOptions:
    """Options of one reducer.

    Attributes:
        counts_dropped: gradients that hooks drop count as zero: see :class:`Reduction`.
        comm_hook: state and hook that the user has registered; ``None`` if there is none.
        steps_optimizers: optimizers step in the backward.
        finalizes_manually: backwards end in ``finalize_backward()``.
    """

    def __init__(self, counts_dropped: bool) -> None:
        self.counts_dropped = counts_dropped
        self.comm_hook: tuple[Any, Hook] | None = None
        self.steps_optimizers = False
        self.finalizes_manually = False
        self._logger: Any = None

    def step_optimizers(self) -> None:
        """Optimizers step in the backward from now on."""
        self.steps_optimizers = True

    # Errors

    def log_errors(self, logger: Any) -> None:
        """Give errors that end a backward to ``logger``."""
        self._logger = logger

    def log_error(self, message: str) -> None:
        """A backward ends with this error."""
        if self._logger is not None:
            self._logger.set_error_and_log(message)

    # Communication hooks

    def use_comm_hook(
        self, state: Any, hook: Hook, compression: Int8 | None, have_owners: bool
    ) -> None:
        """A communication hook is registered.

        Raises:
            RuntimeError: there is one already; or gradients are compressed, or have owners.
        """
        if have_owners:
            raise RuntimeError(
                "ZeroRedundancyOptimizer has gradients reduced to their owners, a communication "
                "hook to all ranks: leave one of them out"
            )
        if compression is not None:
            raise RuntimeError(
                "compression='int8' and a communication hook both decide how gradients are sent: "
                "leave one of them out"
            )
        if self.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self.comm_hook = state, hook

    # Backwards that end where the user says (in stock DDP from torch 2.15)

    def check_finalized(self, backward: Backward | None, where: str) -> None:
        """Raise a RuntimeError if ``backward`` waits for ``finalize_backward()``."""
        if backward is not None and backward.phase is UNFINALIZED:
            raise RuntimeError(
                f"{where}: Expected to have finalized the prior backward pass before "
                "starting a new one. Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is true."
            )

    def finalize_manually(self, required: bool, runs: bool, where: str) -> None:
        """Set :attr:`finalizes_manually`; a RuntimeError if a backward ``runs``."""
        # (A backward that failed is over: the next forward makes up for it.)
        if runs:
            raise RuntimeError(
                f"{where}: set_manual_finalization_required cannot be called after forward "
                "while a backward pass is expected or in progress. Set "
                "require_manual_backward_finalization before forward or after backward finalization"
            )
        self.finalizes_manually = required

    def check_may_finalize(self) -> None:
        """Raise a RuntimeError if backwards end by themselves."""
        if not self.finalizes_manually:
            raise RuntimeError(
                "finalize_backward() called but manual backward finalization is not required. Set "
                "require_manual_backward_finalization to true first."
            )

    def check_launched(self, reduction: Reduction, where: str) -> None:
        """Raise a RuntimeError if not all buckets are launched."""
        if len(reduction.works) < len(reduction.buckets):
            raise RuntimeError(
                f"{where}: finalize_backward() called before all DDP buckets were "
                f"ready. next_bucket_={len(reduction.works)}. Call finalize_backward() only after "
                "all DDP-managed parameters have computed gradients."
            )

    def refuse_to_finalize(self, where: str) -> NoReturn:
        """Raise a RuntimeError: there is nothing to finalise."""
        raise RuntimeError(
            f"{where}: finalize_backward() called but no gradient reduction requires "
            "finalization. This can happen if no_sync() is active or finalize_backward() was "
            "already called for this backward pass."
        )
