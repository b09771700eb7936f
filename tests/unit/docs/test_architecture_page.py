"""What the page about the architecture names is there: modules, keys of the configuration, other pages."""

import re
from pathlib import Path

import pytest

from services.common.config import Config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTIONS = "|".join(Config.model_fields)
MODULES = sorted(set(re.findall(r"`((?:common|rollout|reward|trainer|cli)/[a-z_/.]+)`", PAGE)))
# Boxes of the diagram, by the service that they are in.
BOXES = [
    f"{service}/{box}.py"
    for service, inside in re.findall(r"subgraph (\w+) .*?\n(.*?)\n    end", PAGE, re.DOTALL)
    for box in re.findall(r"\[\"([a-z_/]+)\"\]", inside)
]
KEYS = sorted(set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)(?:: \w+)?`", PAGE)))


def test_the_page_names_modules_boxes_and_keys() -> None:
    assert len(MODULES) > 25
    assert len(BOXES) > 8
    assert len(KEYS) > 10


@pytest.mark.parametrize("path", [*MODULES, *BOXES])
def test_every_module_is_there(path: str) -> None:
    assert (ROOT / "services" / path).exists()


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_one_of_the_configuration(key: str) -> None:
    section: object = Config.model_validate(
        {
            "run": {"name": "page"},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
        }
    )
    for name in key.split("."):
        assert hasattr(section, name), key
        section = getattr(section, name)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)", PAGE))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / "docs" / target).exists()


def test_lines_fit() -> None:
    assert max(map(len, PAGE.splitlines())) <= 120
