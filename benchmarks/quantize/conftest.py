"""The import path of the kernel benchmark's clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
