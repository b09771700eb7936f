"""ZeRO-3 from the first byte: two ranks load what neither holds whole, with real DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.ranks import FAMILIES

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def size(ranks: Path) -> int:
    """Bytes of the large model's parameters, of which a layer has a thirty-second."""
    total = sum(path.stat().st_size for path in (ranks / "sharded" / "large").glob("*.safetensors"))
    assert total > 200e6
    return total


@pytest.fixture(scope="module")
def results(ranks: Path) -> list[dict[str, Any]]:
    return [json.loads((ranks / "sharded" / f"results-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_no_rank_holds_much_more_than_its_part(results: list[dict[str, Any]], size: int) -> None:
    """The part is a half; the rest is what a few layers take while one is read, fused, sent and probed."""
    for found in results:
        memory = found["memory"]
        assert memory["loading"] < 0.75 * size, memory
        assert memory["reference"] < 0.75 * size, memory
        assert memory["computing"] < 0.25 * size, memory
        # The measure sees what it is to see.
        assert memory["whole"] > size, memory


def test_a_reference_that_is_cut_computes_as_a_whole_one(results: list[dict[str, Any]]) -> None:
    assert [found["memory"]["gap"] < 1e-5 for found in results] == [True, True]


def test_what_the_ranks_hold_together_is_what_a_plain_load_gives(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["families"].keys() == {f"{name} {dtype}" for name in FAMILIES for dtype in ("float32", "bfloat16")}
        assert not any(found["families"].values()), found["families"]
