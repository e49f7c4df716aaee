"""Public calls with any arguments. Each lets pass only what its docstring announces."""

import copy
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import tritonddp
from fuzz.arguments import absurd, batch, flags, numbers, tensors
from fuzz.contract import Users, only_documented
from tritonddp import DistributedDataParallel as DDP
from tritonddp import Int8

Draw = Callable[[st.SearchStrategy[Any]], Any]

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "gradient_as_bucket_view": st.booleans(),
        "bucket_cap_mb": st.sampled_from([1e-5, 1e-4, 25]),
        "lazy_bucket_allocation": st.booleans(),
        "find_unused_parameters": st.sampled_from([None, True]),
        "skip_all_reduce_unused_params": st.booleans(),
        "check_finite": st.sampled_from([None, "raise", "warn"]),
        "transport": st.sampled_from(["auto", "process_group"]),
        "metrics": st.booleans(),
        "scalars": st.just(("loss",)),
    },
)

_VALID = {
    "bucket_cap_mb": st.sampled_from([25, 1e-6, 0.5]),
    "bucket_cap_mb_list": st.sampled_from([[1], [1e-6, 2], (3,), []]),
    "reduce_dtype": st.sampled_from([torch.bfloat16, torch.float16]),
    "compression": st.sampled_from(
        [
            "int8",
            *(Int8(exact=which) for which in ("body.weight", "*", ["head.*"])),
            Int8(error_feedback=False, exact=lambda name, _: "h" in name),
        ]
    ),
    "check_finite": st.sampled_from(["raise", "warn"]),
    "transport": st.sampled_from(["auto", "process_group", "peer_memory"]),
    "gradient_divide_factor": st.sampled_from([1, 2.5]),
    "metrics": st.booleans(),
    "scalars": st.sampled_from(["loss", ("loss", "tokens"), []]),
    "device_ids": st.sampled_from([[], [0], [0, 1], ["cpu"]]),
}
_NAMES = [name for name in inspect.signature(DDP).parameters if name != "module"]


def constructor_options() -> st.SearchStrategy[dict[str, Any]]:
    """Up to three, mostly absurd."""

    def values(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries(
            {
                name: st.one_of(_VALID[name], absurd()) if name in _VALID else absurd()
                for name in names
            }
        )

    return st.lists(st.sampled_from(_NAMES), max_size=3, unique=True).flatmap(values)


def _step(ddp: DDP) -> None:
    ddp(batch()).sum().backward()


# Calls with arguments that are drawn, by name of the method; with a step behind it where what was
# given is used there.

_PARAMS = ["body.weight", "body.bias", "head.weight", "head.bias"]
_LISTS = st.lists(st.one_of(absurd(), tensors()), max_size=5)


def _returning(value: Any) -> Any:
    return lambda *_: value


def _completed(value: Any) -> Any:
    def hook(*_: Any) -> Any:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(value)
        return future

    return hook


def _raising(*_: Any) -> Any:
    raise Users


def _odd_names(a: Any, b: Any = None, *, c: Any = 1) -> Any:
    return None


def _annotated(state: Any, bucket: int) -> Any:
    return None


def hooks() -> st.SearchStrategy[Any]:
    """Communication hooks: right ones, wrong ones, and what is none."""
    return st.one_of(
        absurd(),
        absurd().map(_returning),
        absurd().map(_completed),
        st.sampled_from(
            [
                default_hooks.allreduce_hook,
                default_hooks.fp16_compress_hook,
                default_hooks.bf16_compress_hook,
                functools.partial(default_hooks.allreduce_hook, None),
                _raising,
                _odd_names,
                _annotated,
                len,
                lambda: None,
            ]
        ),
    )


def _states() -> st.SearchStrategy[Any]:
    names = ["head.bias", "head.weight", "body.bias", "body.weight"]
    good: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "bucket_order": names,
        "weight_unit": 16.0,
        "sent": {},
        "reduced": {},
    }
    entries = st.one_of(
        absurd(), st.lists(st.sampled_from([*names, "zz", 3, None, -1, math.nan]), max_size=6)
    )
    changed = st.dictionaries(st.sampled_from([*good]), entries, max_size=2)
    return st.one_of(
        changed.map(lambda entries: {**good, **entries}),
        st.sampled_from([*good]).map(lambda key: {k: v for k, v in good.items() if k != key}),
        absurd(),
    )


METHODS: dict[str, tuple[list[st.SearchStrategy[Any]], bool]] = {
    "reduce_gradients": (
        [
            st.one_of(
                st.none(),
                absurd(),
                _LISTS,
                st.dictionaries(
                    st.sampled_from([*_PARAMS, "x", 3]), st.one_of(absurd(), tensors()), max_size=3
                ),
            ),
            st.one_of(st.none(), absurd(), _LISTS),
        ],
        False,
    ),
    "register_comm_hook": ([st.one_of(st.none(), absurd()), hooks()], True),
    "_register_builtin_comm_hook": ([absurd()], False),
    "_register_fused_optim": ([absurd()], False),
    "_register_buffer_comm_hook": ([absurd(), absurd().filter(lambda e: not callable(e))], False),
    "_set_ddp_runtime_logging_sample_rate": ([absurd()], False),
    "_default_broadcast_coalesced": ([st.one_of(absurd(), st.lists(absurd(), max_size=2))], False),
    "metrics": ([], False),
    "reduced_scalars": ([], False),
}


def method(name: str, ddp: DDP, draw: Draw) -> None:
    """Call it by its name."""
    strategies, is_used = METHODS[name]
    with only_documented(getattr(DDP, name)):
        getattr(ddp, name)(*map(draw, strategies))
        if is_used:
            _step(ddp)


# Contexts, and calls with something around them.


def forward(ddp: DDP, draw: Draw) -> None:
    args = draw(st.lists(absurd(), max_size=2))
    named = draw(st.dictionaries(st.sampled_from(["a", "b"]), absurd(), max_size=2))
    with only_documented(DDP.forward):
        out = ddp(batch(), *args, **named)
        (out[0] if isinstance(out, tuple) else out).sum().backward()


def gradients_of_its_own(ddp: DDP, draw: Draw) -> None:
    own = list(ddp.module.parameters())
    gradients = draw(st.one_of(st.none(), st.just([torch.ones_like(param) for param in own])))
    params = draw(st.one_of(st.just(own), st.just(iter(own)), absurd()))
    with only_documented(DDP.reduce_gradients):
        ddp.reduce_gradients(gradients, params)


def weighted(ddp: DDP, draw: Draw) -> None:
    n = draw(st.one_of(numbers(), tensors(), absurd()))
    reduction = draw(st.one_of(st.sampled_from(["mean", "sum"]), absurd()))
    with only_documented(DDP.weighted), ddp.weighted(n, reduction):
        _step(ddp)


def scalars(ddp: DDP, draw: Draw) -> None:
    names = st.sampled_from(["loss", "loss", "loss", "other"])
    values = draw(st.dictionaries(names, st.one_of(numbers(), tensors(), absurd()), max_size=1))
    with only_documented(DDP.add_scalars):
        ddp.add_scalars(**values)
        _step(ddp)


def join(ddp: DDP, draw: Draw) -> None:
    with (
        only_documented(DDP.join, DDP.join_hook),
        ddp.join(draw(flags()), draw(flags()), draw(flags())),
    ):
        for _ in range(draw(st.integers(0, 2))):
            _step(ddp)


def load_comm_state(ddp: DDP, draw: Draw) -> None:
    with only_documented(DDP.load_comm_state_dict):
        ddp.load_comm_state_dict(*draw(st.lists(_states(), max_size=2)))
    with only_documented(DDP.comm_state_dict):
        ddp.load_comm_state_dict(ddp.comm_state_dict())


def manual_finalization(ddp: DDP, draw: Draw) -> None:
    wanted = draw(st.one_of(st.booleans(), numbers(), st.sampled_from(["", "no", b""])))
    with only_documented(DDP.require_manual_backward_finalization):
        ddp.require_manual_backward_finalization = wanted
    with only_documented(DDP.finalize_backward, DDP.forward):
        for _ in range(draw(st.integers(0, 2))):
            _step(ddp)
        ddp.finalize_backward()
    with only_documented(DDP.finalize_backward):
        ddp.finalize_backward()
    with only_documented(DDP.require_manual_backward_finalization):
        ddp.require_manual_backward_finalization = False


def stopping(ddp: DDP, draw: Draw) -> None:
    signals = draw(st.lists(absurd(), max_size=2))
    with only_documented(tritonddp.stop_on_signal), tritonddp.stop_on_signal(*signals):
        pass
    if draw(st.booleans()):
        ddp.request_stop()
    with only_documented(DDP.forward):
        ddp.should_stop()


def check_sync(ddp: DDP, draw: Draw) -> None:
    with only_documented(DDP.check_sync):
        ddp.check_sync(buffers=draw(flags()), gradients=draw(flags()))


def other_group(ddp: DDP, draw: Draw) -> None:
    ddp._update_process_group(draw(absurd()))
    assert ddp._get_ddp_logging_data()


def ignored_names(ddp: DDP, draw: Draw) -> None:
    ignore = DDP._set_params_and_buffers_to_ignore_for_model
    with only_documented(ignore):
        ignore(copy.deepcopy(ddp.module), draw(absurd()))


def added(ddp: DDP, draw: Draw) -> None:
    """Parameters of which some cannot be reduced."""
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.complex64]))
    new = torch.ones(2, dtype=dtype)
    is_eighth = draw(st.booleans())
    ddp.module.more = torch.nn.Parameter(new.to(torch.float8_e5m2) if is_eighth else new)
    with only_documented(DDP.forward):
        _step(ddp)
    del ddp.module.more


CALLS: dict[str, Callable[[DDP, Draw], None]] = {
    **{name: functools.partial(method, name) for name in METHODS},
    **{
        call.__name__: call
        for call in (
            *(forward, gradients_of_its_own, weighted, scalars, join, load_comm_state),
            *(manual_finalization, stopping, check_sync, other_group, ignored_names, added),
        )
    },
}
