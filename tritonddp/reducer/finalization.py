"""Backwards that end where the caller says, in ``finalize_backward()`` (stock: from torch 2.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tritonddp.coordination.agreement import Mismatch
from tritonddp.reducer import recovery

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


def check(reducer: Reducer) -> None:
    """Raise a RuntimeError if a backward waits for :func:`finalize`."""
    if reducer.run is not None and reducer.run.awaits_finalize:
        raise RuntimeError(
            f"{reducer.where()}: Expected to have finalized the prior backward pass before "
            "starting a new one. Call finalize_backward() after backward() when "
            "require_manual_backward_finalization is true."
        )


def require(reducer: Reducer, required: bool) -> None:
    """Whether backwards end in :func:`finalize`, not by themselves."""
    # (A backward that failed is over: the next forward makes up for it.)
    if reducer.backward_runs or (reducer.run is not None and reducer.run.awaits_finalize):
        raise RuntimeError(
            f"{reducer.where()}: set_manual_finalization_required cannot be called after forward "
            "while a backward pass is expected or in progress. Set "
            "require_manual_backward_finalization before forward or after backward finalization"
        )
    reducer.finalizes_manually = required


@torch.no_grad()
def finalize(reducer: Reducer) -> None:
    """Wait for the buckets of a backward that is over, or has launched all of them."""
    if not reducer.finalizes_manually:
        raise RuntimeError(
            "finalize_backward() called but manual backward finalization is not required. Set "
            "require_manual_backward_finalization to true first."
        )
    run = reducer.run
    if run is not None and run.awaits_finalize:
        run.awaits_finalize = False  # if it fails, the next forward makes up for it
        reducer.finish(run)
        return
    if run is not None and reducer.backward_runs and not run.is_local:
        if len(run.works) < len(run.buckets):
            raise RuntimeError(
                f"{reducer.where()}: finalize_backward() called before all DDP buckets were "
                f"ready. next_bucket_={len(run.works)}. Call finalize_backward() only after "
                "all DDP-managed parameters have computed gradients."
            )
        if any(run.works):
            try:
                run.finish()  # the end of the backward does the rest
            except Mismatch as error:
                recovery.raise_mismatch(reducer, error, run)
            return
    raise RuntimeError(
        f"{reducer.where()}: finalize_backward() called but no gradient reduction requires "
        "finalization. This can happen if no_sync() is active or finalize_backward() was "
        "already called for this backward pass."
    )
