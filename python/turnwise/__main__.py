"""``python -m turnwise`` is the command line."""

import sys

from turnwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
