"""A version from memory under ZeRO-3, with real DeepSpeed on two ranks: gathered in step, also when a rollout fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.trainer.ranks import SENT

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=SENT)
def directory(request: pytest.FixtureRequest, ranks: Path) -> Path:
    found: Path = ranks / "weights" / request.param
    return found


@pytest.fixture
def results(directory: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    return loaded


def test_what_goes_over_the_wire_is_the_model(directory: Path) -> None:
    expected, sent = load_file(directory / "model" / "model.safetensors"), load_file(directory / "memory.safetensors")
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(sent[name].to(tensor.dtype), tensor), name


def test_both_ranks_go_on_together_when_a_rollout_fails(results: dict[str, Any]) -> None:
    assert results["versions"] == [0, 1, 2, 3]
    # The first, and the one that failed.
    assert results["on disk"] == [True, False, True, False]
    assert results["taken over"] == [0, 1, 2, 3]
    assert results["last"] == 3
    assert results["parts"] > 1
    assert results["exported bytes"] == results["bytes"]
