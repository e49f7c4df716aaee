"""Trainer of transformers: what ``metrics()`` tells goes to its loggers.

from tritonddp.integrations.accelerate import use_tritonddp
from tritonddp.integrations.transformers import MetricsCallback

use_tritonddp(trainer.accelerator, metrics=True)
trainer.add_callback(MetricsCallback(trainer))
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":  # it is there, and lacks something itself
        raise
    raise ImportError(
        f"{__name__} needs transformers, which is not installed: pip install transformers"
    ) from error

from tritonddp.integrations.metrics import check_every, numbers_of

_Base: Any = TrainerCallback


class MetricsCallback(_Base):
    """Has ``trainer`` log the numbers of ``metrics()`` as ``ddp/...``, on rank 0.

    They go where its losses go: to the integrations of ``report_to``, TensorBoard or Weights &
    Biases say, and the terminal.

    Args:
        trainer: whose model is wrapped with tritonddp and ``metrics=True`` when it trains.
        every: steps of the optimizer from one log to the next.

    Raises:
        RuntimeError, TypeError: after the first step on every rank, if that model is wrapped
            without ``metrics=True``, or not with tritonddp.
        ValueError: ``every`` is no whole number from 1 on.

    Example::

        from tritonddp.integrations.accelerate import use_tritonddp
        from tritonddp.integrations.transformers import MetricsCallback

        use_tritonddp(trainer.accelerator, metrics=True)  # trainer: a transformers.Trainer
        trainer.add_callback(MetricsCallback(trainer, every=2))
        trainer.train()
    """

    def __init__(self, trainer: Any, every: int = 100) -> None:
        self._trainer = trainer
        self._every = check_every(every)
        self._was_checked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The model may be another one than in the last training."""
        self._was_checked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has made a step."""
        is_due = state.is_world_process_zero and state.global_step % self._every == 0
        if self._was_checked and not is_due:
            return
        found = numbers_of(self._trainer.model_wrapped)
        self._was_checked = True
        if is_due:
            logs_loss = control.should_log  # which any log makes false
            self._trainer.log(found)
            control.should_log = logs_loss
