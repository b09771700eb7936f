"""The page for those who come from elsewhere names keys that exist, with the defaults that they have."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.common.config import Config, ScorerConfig
from services.reward.scorers.user import user_scorer

PAGE = (Path(__file__).parents[3] / "docs/migrating.md").read_text(encoding="utf-8")
# The Trivet column begins with a key, perhaps with a value behind it; the default is the last column.
ROW = re.compile(r"^\| .+ \| `([a-z_.]+)(?:: [a-z_]+)?`.* \| `([^`]+)` \|$", re.MULTILINE)
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def field_of(key: str) -> FieldInfo:
    section: Any = Config
    *parents, last = key.split(".")
    for part in parents:
        annotation = section.model_fields[part].annotation
        kinds = [annotation, *get_args(annotation)]
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return section.model_fields[last]  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize(("key", "default"), sorted(set(ROW.findall(PAGE))))
def test_a_key_has_the_default_that_the_page_gives(key: str, default: str) -> None:
    assert plain(field_of(key).get_default(call_default_factory=True)) == yaml.safe_load(default)


def test_no_row_of_a_table_is_left_unchecked() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    headers = [line for line in rows if line.endswith("| Trivet | default |")]
    assert len(headers) == 3
    assert len(ROW.findall(PAGE)) == len(rows) - len(headers) > 60


def test_the_scorers_on_the_page_are_taken() -> None:
    blocks = BLOCK.findall(PAGE)
    assert blocks
    for block in blocks:
        names: dict[str, Any] = {"compute_score": lambda source, text, truth, extra: float(text == truth)}
        exec(block, names)
        function = names.get("score") or names["reward"]
        scorer = user_scorer(function, ScorerConfig(name="mine:function"))
        assert scorer("1 + 1 =", "2", {"answer": "2", "ground_truth": "2", "data_source": "sums"}) == 1.0
