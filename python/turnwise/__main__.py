"""``python -m turnwise`` is the command line."""

from turnwise.cli.main import entry

if __name__ == "__main__":
    entry()
