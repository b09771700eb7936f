"""Waits for a file on a shared volume, which sends no change events, so it polls once a second."""

import argparse
import sys
import time
from pathlib import Path

LOOK_SECONDS = 1.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    while not arguments.file.exists():
        if time.monotonic() > deadline:
            sys.stderr.write(f"{arguments.file} is not there after {arguments.seconds:.0f} s\n")
            return 1
        time.sleep(LOOK_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
