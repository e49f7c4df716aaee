"""Trainer of transformers: a callback that stops all ranks together."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":  # it is installed, but lacks a dependency
        raise
    raise ImportError(
        f"{__name__} requires transformers, which is not installed: pip install transformers"
    ) from error

from tritonddp.integrations.signals import StopOnSignal, should_stop, stop_on_signal

_Base: Any = TrainerCallback


class StopCallback(_Base):
    """Saves and stops on all ranks after the same step, once one rank has received a signal.

    It also does so once one rank has called ``request_stop()`` of the wrapped model. The checkpoint
    is a Trainer checkpoint: ``train(resume_from_checkpoint=True)`` continues from it.

    Args:
        trainer: a Trainer whose model is wrapped with tritonddp.
        signals: as for :func:`tritonddp.stop_on_signal`; ``signal.SIGTERM`` by default. The
            handler is installed during training.

    Raises:
        RuntimeError, ValueError: when training starts, as :func:`tritonddp.stop_on_signal`.
        TypeError: when training starts, in the same way; or after the first step, if the model is
            not wrapped with tritonddp.

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
        """Set the handler. Replace a handler that was left by training that failed."""
        self.on_train_end(args, state, control)
        self._handler = stop_on_signal(*self._signals)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop if a rank has requested it."""
        if should_stop(self._trainer.model_wrapped):
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the handler."""
        if self._handler is not None:
            self._handler.remove()
            self._handler = None
