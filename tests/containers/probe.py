"""python -m tests.containers.probe: ends with 1 and the reason where no engine of its own can run a container."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.containers.engine import Engine

# Linked statically, so that it is an image by itself.
PROGRAM = "sbin/ldconfig"


def run_a_container(directory: Path) -> None:
    engine = Engine(directory)
    try:
        engine.start()
        archive = directory / "image.tar"
        subprocess.run(["tar", "-C", "/", "-chf", archive, PROGRAM], check=True, timeout=20)
        with archive.open("rb") as image:
            engine.docker("import", "-", "probe", stdin=image)
        engine.docker("run", "--rm", "--network=none", "probe", f"/{PROGRAM}", "--version")
    finally:
        engine.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="trivet-probe-") as temporary:
        try:
            run_a_container(Path(temporary))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            sys.exit(f"no container can run here: {error}")
