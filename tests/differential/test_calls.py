"""Calls with arbitrary arguments raise only documented errors, and the next step is correct."""

import builtins
import contextlib
import copy
import inspect
import linecache
import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import assert_close, gradients, squares, train_step

import tritonddp
from tritonddp import DistributedDataParallel as DDP

WIDTH = 4
LIBRARY = Path(tritonddp.__file__).parent

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one rank in the test process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def errors_of(documented: Any) -> tuple[type[BaseException], ...]:
    """The exceptions in the ``Raises:`` section of a docstring (Google style)."""
    doc = inspect.getdoc(documented) or ""
    section = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    names = re.findall(r"^[ ]{4}(\w+):", section.group(1), re.MULTILINE) if section else []
    return tuple(getattr(builtins, name) for name in names)


@contextlib.contextmanager
def only_documented(documented: Any, what: object) -> Iterator[None]:
    """Context: suppress documented exceptions that a ``raise`` of the library has raised.

    Args:
        documented: the function that is called inside.
        what: the call, in words.
    """
    try:
        yield
    except Exception as error:
        *_, (frame, number) = traceback.walk_tb(error.__traceback__)
        path = frame.f_code.co_filename
        is_deliberate = linecache.getline(path, number).strip().startswith("raise")
        is_ours = LIBRARY in Path(path).parents and is_deliberate
        if not (is_ours and isinstance(error, errors_of(documented))):
            pytest.fail(f"{what} raised {error!r} in {path}:{number}")


class Net(nn.Module):
    """Two layers and a buffer; it also returns its other arguments."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor, *also: Any) -> Any:
        out = self.head(torch.tanh(self.body(x)))
        return (out, also) if also else out


def net_with(name: str, value: Any) -> nn.Module:
    net = Net()
    setattr(net, name, nn.Parameter(value, False) if isinstance(value, Tensor) else value)
    return net


def computing() -> nn.Module:
    """A parameter is replaced by a computed tensor."""
    net = Net()
    del net.head.weight
    net.head.weight = torch.ones(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) * 2
    return net


IGNORED = "_ddp_params_and_buffers_to_ignore"
MODULES: list[Callable[[], Any]] = [
    *(Net, nn.Module, computing, lambda: nn.LazyLinear(3), lambda: 3, lambda: Net().to("meta")),
    *(lambda: Net(torch.bfloat16), lambda: Net(torch.complex64)),
    *(partial(net_with, IGNORED, names) for names in (["body.weight"], 3, [None, 3])),
    lambda: net_with("head", nn.Linear(WIDTH, WIDTH, device="meta")),
    lambda: Net().requires_grad_(False),
    lambda: net_with("number", torch.ones(2, dtype=torch.int64)),
    lambda: net_with("eighth", torch.ones(2).to(torch.float8_e4m3fn)).requires_grad_(),
    lambda: net_with("nothing", torch.empty(0, 3)).requires_grad_(),
    lambda: nn.Embedding(5, 3, sparse=True),
]
ABSURD: list[Any] = [
    *(None, True, 0, 1, -1, 0.5, 2**70, 10**400, 1e-300, math.inf, -math.inf, math.nan, 1j),
    *("", "int8", "mean", "é\0", b"x", torch.float16, torch.int8, torch.device("meta")),
    *(int, len, nn.Module, [None], {"a": 1, 2: "b"}, object(), nn.Linear(3, 3)),
    *(torch.ones(1), torch.ones(0), torch.ones(4, 3), torch.ones(3, device="meta")),
    *(torch.ones(1, dtype=torch.bool), torch.ones(1).to_sparse()),
    *(lambda *_: None, nn.Parameter(torch.ones(2))),
]
BATCH = torch.arange(3.0 * WIDTH, dtype=torch.float64).view(3, WIDTH).sin()
PARAMS = ["body.weight", "body.bias", "head.weight", "head.bias"]
STATE = {"rank": 0, "world_size": 1, "bucket_order": PARAMS[::-1], "weight_unit": 16.0}
STATE |= {"sent": {}, "reduced": {}}


def one_by_one(*arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Arguments of which one is arbitrary, or among the valid values given for it."""
    usual = [each[0] for each in arguments]
    return [
        (*usual[:place], value, *usual[place + 1 :])
        for place, valid in enumerate(arguments)
        for value in (*valid, *ABSURD)
    ]


def completed(value: Any) -> Callable[..., Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return lambda *_: future


# Methods that change the wrapper: a registered hook stays.
STAYS = ("register_comm_hook", "_register_fused_optim", "_register_builtin_comm_hook")
# Arguments of the methods.
METHODS: dict[str, list[tuple[Any, ...]]] = {
    "reduce_gradients": [
        *one_by_one([None], [None]),
        *(([each] * count,) for each in ABSURD for count in (1, 4)),
        *(({name: each},) for each in ABSURD for name in ("body.bias", 3)),
    ],
    "weighted": one_by_one([1.0, torch.ones(()), torch.tensor(math.nan)], ["mean", "sum"]),
    "join": one_by_one([True, False], [True], [False, True]),
    "check_sync": [({key: each},) for key in ("buffers", "gradients") for each in ABSURD],
    "register_comm_hook": [
        *one_by_one([None], [default_hooks.allreduce_hook]),
        *(
            (None, hook(each))
            for each in ABSURD
            for hook in (completed, lambda each: lambda *_: each)
        ),
    ],
    "_register_builtin_comm_hook": one_by_one([None]),
    "_register_fused_optim": one_by_one([None]),
    "_set_ddp_runtime_logging_sample_rate": one_by_one([1]),
    "_default_broadcast_coalesced": one_by_one([None, [torch.ones(2)], [None]]),
    "load_comm_state_dict": [
        *(([STATE],), ([STATE, STATE],), *one_by_one([None]), *(([each],) for each in ABSURD)),
        *(([{**STATE, key: each}],) for key in STATE for each in [*ABSURD, ["zz"], PARAMS[:2]]),
        *(([{k: v for k, v in STATE.items() if k != key}],) for key in STATE),
    ],
    "forward": [(batch, each) for batch in [BATCH] for each in ABSURD],
    "add_scalars": [({"loss": each},) for each in [*ABSURD, torch.tensor(2)]],
    "metrics": [()],
    "reduced_scalars": [()],
}
KEYWORDS = ("add_scalars", "check_sync")  # methods without positional arguments
OPTIONS: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 1e-5,
    "transport": "process_group",
    "metrics": True,
    "check_finite": "warn",
    "scalars": ("loss",),
}


def assert_right(ddp: Any) -> None:
    """The next step gives the gradients of an unwrapped module."""
    alone = copy.deepcopy(ddp.module)
    for net in (ddp, alone):
        train_step(net, BATCH)
    assert_close(gradients(ddp.module), gradients(alone))


def test_modules_that_cannot_be_wrapped_raise_what_the_constructor_documents() -> None:
    for number, make in enumerate(MODULES):
        with only_documented(DDP, f"module {number}"):
            DDP(make())


@pytest.mark.parametrize("name", [*inspect.signature(DDP).parameters][1:])
def test_the_constructor_raises_what_it_documents(name: str) -> None:
    takes_sequences = name in ("output_device", "bucket_cap_mb_list")
    for value in ABSURD:
        if takes_sequences and isinstance(value, Tensor):
            continue  # torch raises its own error
        ddp = None
        with only_documented(DDP, f"{name}={value!r:.40}"):
            ddp = DDP(Net(), **{name: value})
        if ddp is not None and name not in ("reduce_dtype", "gradient_divide_factor"):
            assert_right(ddp)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_raises_what_it_documents(name: str) -> None:
    ddp = None
    for args in METHODS[name]:
        if ddp is None or name in STAYS:
            ddp = DDP(Net(), **OPTIONS)
        method = getattr(ddp, name)
        with only_documented(getattr(DDP, name), f"{name}{args!r:.60}"):
            result = method(**args[0]) if name in KEYWORDS else method(*args)
            is_context = isinstance(result, contextlib.AbstractContextManager)
            with result if is_context else contextlib.nullcontext():
                squares(ddp(BATCH)).backward()
        if name not in STAYS:
            assert_right(ddp)
