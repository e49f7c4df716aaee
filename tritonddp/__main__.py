"""``python -m tritonddp``: the same as the command ``tritonddp``."""

import sys

from tritonddp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
