import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PRINT = "from services.common.run_files.lineage import code_version; print(code_version())"


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def repository(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    git(directory, "init", "-q")
    (directory / ".git" / "info" / "exclude").write_text("__pycache__/\n")
    return directory


def commit(directory: Path) -> str:
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "--allow-empty", "-m", "x")
    return git(directory, "rev-parse", "--short=12", "HEAD")


def install(directory: Path) -> Path:
    # With the cached modules, but for those that somebody is writing.
    shutil.copytree(ROOT / "services", directory / "services", ignore=shutil.ignore_patterns("*.pyc.*"))
    return directory


def version_in(directory: Path, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-B", "-c", PRINT],
        check=True,
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory), **environment},
    )
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    """Of sources in no repository."""
    return version_in(install(tmp_path_factory.mktemp("plain")))


def test_a_checkout_is_its_commit_and_marked_when_it_differs(tmp_path, digest):
    checkout = install(repository(tmp_path))
    made = commit(checkout)
    assert version_in(checkout) == made
    with (checkout / "services" / "common" / "errors.py").open("a") as file:
        file.write("# changed\n")
    changed = version_in(checkout)
    assert changed.startswith(f"{made}+")
    assert changed.removeprefix(f"{made}+") != digest


def test_an_environment_inside_another_repository_is_not_that_one_s_commit(tmp_path, digest):
    other = repository(tmp_path)
    (other / "unrelated.py").write_text("pass\n")
    packages = install(other / ".venv" / "lib")
    for ignored in (".venv/\n", ""):
        (other / ".gitignore").write_text(ignored)
        commit(other)
        assert version_in(packages) == digest


def test_a_repository_at_the_same_place_that_does_not_hold_the_files_does_not_count(tmp_path, digest):
    other = install(repository(tmp_path))
    (other / ".gitignore").write_text("services/\n")
    commit(other)
    assert version_in(other) == digest


def test_a_git_hook_s_environment_does_not_mislead(tmp_path, digest):
    other = repository(tmp_path / "other")
    commit(other)
    packages = install(tmp_path / "packages")
    assert version_in(packages, GIT_DIR=str(other / ".git"), GIT_WORK_TREE=str(packages)) == digest
