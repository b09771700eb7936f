"""`trivet --version`, and the one source that everything with a version agrees with."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import yaml
from typer.testing import CliRunner

from services import __version__
from services.cli.app import app
from services.cli.shared import version as version_module
from services.cli.shared.version import version_lines
from services.common.run_files.lineage import code_version

ROOT = Path(__file__).parents[3]


def test_it_names_the_code_and_the_libraries() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    own, *libraries = result.output.splitlines()
    assert own == f"trivet {__version__} ({code_version()})"
    assert [line.split()[0] for line in libraries] == ["vLLM", "torch", "DeepSpeed"]
    assert libraries[1] == f"torch {version('torch')}"
    assert libraries[2] == f"DeepSpeed {version('deepspeed')}"


def test_a_library_that_is_missing_is_said_to_be(monkeypatch) -> None:
    monkeypatch.setattr(version_module, "LIBRARIES", {"vLLM": ("no-such-package", "nor-this-one")})
    assert list(version_lines())[1:] == ["vLLM is not installed"]


def test_no_library_is_imported_for_it() -> None:
    code = (
        "import sys\nfrom services.cli.shared.version import version_lines\nassert list(version_lines())\n"
        "assert not {'torch', 'vllm', 'deepspeed'} & sys.modules.keys()"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "services.__version__"}
    chart = yaml.safe_load((ROOT / "deploy/k8s/trivet/Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
