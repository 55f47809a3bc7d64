"""`python -m evaluation` and `accelerate launch -m evaluation`: see `command`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
