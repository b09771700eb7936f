"""python -m tests.containers.probe: ends with 1 and the reason where no engine of its own can run a container, or where
Debian's packages or room for the images are missing."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.containers.engine import Engine, program

# Linked statically, so that it is an image by itself.
PROGRAM = "sbin/ldconfig"
# Images, their layers and what is copied to make them.
ROOM_BYTES = 30 << 30


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


def find_packages(directory: Path) -> None:
    command = [program("debootstrap"), "--print-debs", "--variant=minbase", "bookworm", str(directory / "packages")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)


def find_room(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    assert free >= ROOM_BYTES, f"{free >> 30} GiB are free in {directory}, expected {ROOM_BYTES >> 30}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="trivet-probe-") as temporary:
        try:
            for look in (find_room, find_packages, run_a_container):
                look(Path(temporary))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            sys.exit(f"no containers can be checked here: {error}")
