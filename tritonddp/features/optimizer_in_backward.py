"""Optimizers that step in the backward, as soon as the bucket of their parameter is reduced."""

from __future__ import annotations

from tritonddp._torch import optimizer_hooks, optimizers_in_backward, steps_optimizers
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.reduction import LocalError, Reduction
from tritonddp.coordination.agreement import GradSource
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.extension import Extension

# Optimizers can step in the backward only if this module is imported.
OPTIMIZERS_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"


def step_in_backward(driver: AutogradDriver) -> None:
    """Delay the steps of optimizers in the backward until gradients are reduced.

    This removes torch's hooks, which would step before the reduction.
    """
    handles_of = optimizer_hooks()
    if handles_of is None:
        return
    params = [each for _, each in driver.parameters.params if optimizers_in_backward(each)]
    for param in params:
        for handle in handles_of.get(param, ()):
            handle.remove()
    if params:
        used = driver.comm_hook  # may be torch's hook that steps optimizers
        if not driver.steps_optimizers and not (used and steps_optimizers(used.hook)):
            driver.events.install(OptimizerSteps())
        driver.step_optimizers()


class OptimizerStepError(LocalError):
    """An optimizer in the backward failed on this rank."""


class OptimizerSteps(Extension):
    """Steps the optimizers of a bucket's parameters once the bucket is reduced.

    As in stock DDP, ``.grad`` is ``None`` afterwards, and gradients accumulated under ``no_sync``
    or reduced by ``reduce_gradients()`` cause no step. Parameters without such an optimizer keep
    their gradients.
    """

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        """Step. If an optimizer fails, later parameters of the bucket are not stepped."""
        if reduction.source in (GradSource.REQUEST, GradSource.SKIPPED):
            return
        for name, param in zip(bucket.names, bucket.params, strict=True):
            optimizers = optimizers_in_backward(param)
            for optimizer in optimizers:
                try:
                    optimizer.step()
                except Exception as error:
                    raise OptimizerStepError(
                        f"{reduction.where}, {bucket.title}: the optimizer of {name!r} failed in "
                        f"the backward: {type(error).__name__}: {error}"
                    ) from error
            if optimizers:
                param.grad = None

    def on_abort(self, reduction: Reduction | None) -> None:
        """Drop gradients without a step: the user does not call ``zero_grad`` in this mode."""
        if reduction is not None:
            for param in reduction.bucket_set.params:
                if optimizers_in_backward(param):
                    param.grad = None
