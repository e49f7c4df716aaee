"""The import path: the harness of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
