"""The page for an own algorithm: its first block is the example, and the block of the library runs as it stands."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LISTING, LIBRARY = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-algorithm.md").read_text(), re.DOTALL)


def functions(source: str) -> list[str]:
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for function in found:
        if ast.get_docstring(function) is not None:
            del function.body[0]
    return [ast.unparse(function) for function in found]


def test_the_listing_is_the_example() -> None:
    example = (ROOT / "examples/own_algorithm.py").read_text()
    assert functions(LISTING) == functions(example) != []


def test_the_library_runs_alone() -> None:
    """In a process of its own, with no more of Trivet than the objective."""
    code = LIBRARY + (
        "import sys\n"
        "ours = {name for name in sys.modules if name.startswith('services.')}\n"
        "assert {name for name in ours if not name.startswith('services.trainer')} == set(), ours\n"
        "assert not {'vllm', 'deepspeed', 'redis', 'transformers', 'pydantic'} & sys.modules.keys()\n"
        "print(current.grad.isfinite().all().item(), current.grad.abs().sum().item() > 0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    numbers, grad = ended.stdout.strip().splitlines()
    loss, masked, kl = (float(word) for word in numbers.split())
    assert loss != 0
    # The last sequence: a negative advantage, and 0.6 nats a token away from its sampler.
    assert masked == pytest.approx(0.25)
    assert kl > 0
    assert grad == "True True"
