"""Trainer of transformers: callbacks that log ``metrics()``, and let all ranks stop together."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":  # it is installed, and lacks a dependency
        raise
    raise ImportError(
        f"{__name__} needs transformers, which is not installed: pip install transformers"
    ) from error

from tritonddp._arguments import check_every
from tritonddp.integrations.in_place import should_stop
from tritonddp.integrations.metrics import numbers_of
from tritonddp.integrations.signals import StopOnSignal, stop_on_signal

_Base: Any = TrainerCallback


class MetricsCallback(_Base):
    """Logs the numbers of ``metrics()`` as ``ddp/...`` by ``trainer``, on rank 0.

    They go to the same places as its losses: the integrations of ``report_to``, such as TensorBoard
    or Weights & Biases, and the terminal.

    Args:
        trainer: a Trainer whose model is wrapped with tritonddp and ``metrics=True``.
        every: steps of the optimizer from one log to the next.

    Raises:
        RuntimeError, TypeError: after the first step, on every rank, if the model is wrapped
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
        """Check the model again: a second training may have another one."""
        self._was_checked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has made a step."""
        is_due = state.is_world_process_zero and state.global_step % self._every == 0
        if self._was_checked and not is_due:
            return
        found = numbers_of(self._trainer.model_wrapped)
        self._was_checked = True
        if is_due:
            logs_loss = control.should_log  # log() sets it to False
            self._trainer.log(found)
            control.should_log = logs_loss


class StopCallback(_Base):
    """Saves and ends on all ranks after the same step, once one rank has got a signal.

    Or once one has called ``request_stop()`` of the wrapped model. The checkpoint is one of the
    Trainer's: ``train(resume_from_checkpoint=True)`` goes on from it.

    Args:
        trainer: a Trainer whose model is wrapped with tritonddp.
        signals: as for :func:`tritonddp.stop_on_signal`, by default ``signal.SIGTERM``. The handler
            is there while it trains.

    Raises:
        RuntimeError, ValueError: when training starts, as :func:`tritonddp.stop_on_signal`.
        TypeError: likewise; or, after the first step, the model is not wrapped with tritonddp.

    Example::

        from tritonddp.integrations.accelerate import use_tritonddp
        from tritonddp.integrations.transformers import StopCallback

        use_tritonddp(trainer.accelerator)  # trainer: a transformers.Trainer
        trainer.add_callback(StopCallback(trainer))
        trainer.train()
    """

    def __init__(self, trainer: Any, *signals: int) -> None:
        self._trainer, self._signals = trainer, signals
        self._handler: StopOnSignal | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the handler. (One that a training has left which ended by an error is replaced.)"""
        self.on_train_end(args, state, control)
        self._handler = stop_on_signal(*self._signals)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has made a step."""
        if should_stop(self._trainer.model_wrapped):
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the handler back."""
        if self._handler is not None:
            self._handler.remove()
            self._handler = None
