"""What ranks write about themselves to the store of a process group, and how others read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

_LONGEST = 400  # characters


def read_all(store: dist.Store, keys: Mapping[int, str]) -> dict[int, bytes]:
    """Return what ranks wrote under these keys, by rank, without ranks that wrote nothing."""
    if not keys:
        return {}
    if not store.check([*keys.values()]):  # getting a missing key would wait
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts: Any = store.multi_get([*keys.values()]) if keys else []
    return dict(zip(keys, texts, strict=True))


def plain(text: str | bytes, longest: int = _LONGEST) -> str:
    """Return untrusted ``text`` as one printable line of at most ``longest`` characters."""
    if isinstance(text, str):
        text = text.encode(errors="replace")
    characters = text[: 4 * longest].decode(errors="replace")
    line = "".join(c if c.isprintable() else " " for c in characters)
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."
