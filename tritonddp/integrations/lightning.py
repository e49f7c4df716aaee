"""Lightning: a strategy that wraps the model with tritonddp, and a callback to stop together."""

from __future__ import annotations

import signal
from typing import Any

from torch import nn

from tritonddp.integrations.signals import StopOnSignal, checked, should_stop, stop_on_signal
from tritonddp.integrations.strategies import lightning_class
from tritonddp.wrapper import DistributedDataParallel

_PACKAGES = "lightning.pytorch", "pytorch_lightning"
_Base: Any = lightning_class(__name__, "strategies.DDPStrategy", *_PACKAGES)
_Callback: Any = lightning_class(__name__, "callbacks.Callback", *_PACKAGES)


class TritonDDPStrategy(_Base):
    """Lightning's ``DDPStrategy`` with :class:`tritonddp.DistributedDataParallel` as the wrapper.

    Accepts the same arguments, and passes arguments unknown to Lightning to the wrapper. Variants
    such as Lightning's ``ddp_find_unused_parameters_true`` are not needed.
    If both packages of Lightning are installed, import it after the one that you use.

    Example::

        from pytorch_lightning import Trainer  # or lightning.pytorch
        from tritonddp.integrations.lightning import TritonDDPStrategy

        trainer = Trainer(strategy=TritonDDPStrategy(), devices=2, max_steps=4)
        trainer.fit(lightning_module, loader)
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)


class StopCallback(_Callback):
    """Ends training on all ranks after the same batch, once one rank has received a signal.

    Training also ends once one rank has called ``request_stop()`` of the wrapped model. A
    checkpoint is saved first. Lightning then ends as with ``trainer.should_stop``: it validates, if
    the model has a validation step, and calls ``on_train_end``. It ignores ``min_epochs`` and
    ``min_steps``.

    During training, Lightning's own handler does not receive these signals: it would run a
    collective that the other ranks do not run, and hang (Lightning#20806, #20825). A second signal
    has the effect that it had before training.

    Args:
        signals: as for :func:`tritonddp.stop_on_signal`; ``signal.SIGTERM`` by default.
        path: path of the checkpoint, for ``trainer.fit(..., ckpt_path=path)`` of the next run. No
            checkpoint is saved without it.

    Raises:
        RuntimeError, TypeError, ValueError: when training starts: the model is not wrapped with
            tritonddp; or as :func:`tritonddp.stop_on_signal`.

    Example::

        from pytorch_lightning import Trainer
        from tritonddp.integrations.lightning import StopCallback, TritonDDPStrategy

        callbacks = [StopCallback(path="preempted.ckpt")]
        trainer = Trainer(strategy=TritonDDPStrategy(), callbacks=callbacks, devices=2, max_steps=4)
        trainer.fit(lightning_module, loader)
    """

    def __init__(self, *signals: int, path: str | None = None) -> None:
        self._signals, self._path = signals or (signal.SIGTERM,), path
        self._before: dict[int, Any] = {}  # previous handlers
        self._handler: StopOnSignal | None = None
        self._least: tuple[Any, Any] | None = None  # the trainer's min_epochs and min_steps

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the current handlers, before Lightning sets its own."""
        self._before = {each: signal.getsignal(each) for each in checked(self._signals)}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the handler."""
        should_stop(trainer.model)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._handler = stop_on_signal(*self._signals)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save and stop if a rank has requested it; all ranks are here."""
        if self._least is not None or not should_stop(trainer.model):
            return
        loop = trainer.fit_loop
        self._least = loop.min_epochs, loop.epoch_loop.min_steps
        if self._path is not None:
            trainer.save_checkpoint(self._path)
        loop.min_epochs = loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the handlers and limits."""
        if self._handler is not None:
            self._handler.remove()
        if self._least is not None:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._least
        self._handler = self._least = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore handlers and limits when training ends without ``on_train_end``."""
        self.on_train_end(trainer, pl_module)
