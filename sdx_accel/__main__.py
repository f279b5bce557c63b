"""`python -m sdx_accel` is the command `sdx-accel`."""

import sys

from sdx_accel.cli import main

if __name__ == "__main__":
    sys.exit(main())
