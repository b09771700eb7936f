"""Stand-ins for the base images, under their names, made of Debian's packages: this machine may reach no registry.

What they share with the real ones is what the deployment relies on: the programs, the users and the folders.
"""

import os
import shutil
import subprocess
from pathlib import Path

from tests.containers.engine import Engine, program

MAKE_SECONDS = 600
PACKAGES = (
    "ca-certificates",
    "prometheus",
    "prometheus-alertmanager",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
    "redis-server",
    "redis-tools",
    "wget",
)
DEBIAN = "trivet-check/debian"
# How pip reaches its index from this machine, where that takes settings.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SETTINGS = (
    "PIP_CERT",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_DEFAULT_TIMEOUT",
    "SSL_CERT_FILE",
)


def make_bases(engine: Engine, directory: Path, images: dict[str, str]) -> None:
    """`images`: what stands for what, e.g. {"python": "python:3.11.14-slim-bookworm"}."""
    _import_debian(engine, directory)
    for kind, tag in images.items():
        engine.build(tag, "-", text=f"FROM {DEBIAN}\n{RECIPES[kind]}")


RECIPES = {
    "python": "RUN ln -s /usr/bin/python3 /usr/local/bin/python\n",
    "redis": "RUN install --directory --owner redis --group redis /data\nWORKDIR /data\n",
    "prometheus": (
        "RUN install --directory --owner nobody --group nogroup /prometheus\n"
        'WORKDIR /prometheus\nENTRYPOINT ["/usr/bin/prometheus"]\n'
    ),
    "alertmanager": (
        "RUN install --directory --owner nobody --group nogroup /alertmanager\n"
        'WORKDIR /alertmanager\nENTRYPOINT ["/usr/bin/prometheus-alertmanager"]\n'
    ),
}


def _import_debian(engine: Engine, directory: Path) -> None:
    root = directory / "root"
    subprocess.run(
        [program("debootstrap"), "--variant=minbase", f"--include={','.join(PACKAGES)}", "bookworm", str(root)],
        check=True,
        stdout=(directory / "debootstrap.log").open("wb"),
        stderr=subprocess.STDOUT,
        timeout=MAKE_SECONDS,
    )
    if CERTIFICATES.exists():
        shutil.copyfile(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(place).is_dir():
            shutil.copytree(place, root / place.lstrip("/"))
    changes = [f"--change=ENV {name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    archive = subprocess.Popen([program("tar"), "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
    engine.docker("import", *changes, "-", DEBIAN, stdin=archive.stdout, timeout=MAKE_SECONDS)
    assert archive.wait(10) == 0
    shutil.rmtree(root)
