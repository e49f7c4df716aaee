"""What torch says of collectives that differ, in fewer words.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares them before they are made, and its error
prints all that it knows of both, of which the operation, the sizes and the dtypes are of use.
"""

from __future__ import annotations

import re

# CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[116], TensorDtypes=Float,
#     TensorDeviceTypes=TensorOptions(dtype=float (default), ..., memory_format=(nullopt)))
_COLLECTIVE = re.compile(
    r"CollectiveFingerPrint\(SequenceNumber=(?P<number>\d+), OpType=(?P<kind>\w+)"
    r"(?:, TensorShape=(?P<shape>.*?), TensorDtypes=(?P<dtype>.*?), TensorDeviceTypes="
    r".*?memory_format=\([^()]*\)\))?\)"
)

REMEDY = (
    "The ranks are not at the same collective, or not of the same size: build the same module with "
    "the same options on every rank (init_sync=True compares them), call wrapped modules in the "
    "same order, and make the same reduced backwards. At level DEBUG the logger tritonddp tells "
    "the buckets of each rank, and when each of them is sent."
)


def is_mismatch(text: str) -> bool:
    """Whether torch has found that ranks make different collectives."""
    return "Detected mismatch between collectives" in text


def in_short(text: str) -> str:
    """The same with what is of use of each collective, such as ``ALLREDUCE of [116] Float, #7``."""
    if not is_mismatch(text):
        return text
    return _COLLECTIVE.sub(_short, text).replace(".Collectives", ". Collectives")


def _short(found: re.Match[str]) -> str:
    of = f" of {found['shape']} {found['dtype']}" if found["shape"] else ""
    return f"{found['kind']}{of}, #{found['number']}"
