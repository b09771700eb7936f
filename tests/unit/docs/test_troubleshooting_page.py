"""The page quotes messages that the code has, and links to places that are there."""

import re
from pathlib import Path

import pytest

from services.common import exit_codes

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
# Neighbouring pieces of a literal are one message; what is filled in is left out.
SOURCE = re.sub(
    r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "services").rglob("*.py"))
)
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)
PAGES = ("README.md", "SECURITY.md", "docs/by-hand.md", "docs/migrating.md", "docs/own-algorithm.md", "docs/policy.md")
PAGES += ("docs/rewards.md", "docs/troubleshooting.md", "docs/compatibility.md")


def test_every_exit_status_has_its_row() -> None:
    rows = {int(status) for status in re.findall(r"^\| (\d+)[^|]*\|", PAGE, re.MULTILINE)}
    assert rows == {value for value in vars(exit_codes).values() if isinstance(value, int)}


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert message in SOURCE


def test_enough_is_quoted() -> None:
    assert len(QUOTED) > 25


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    here = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", here.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (here.parent / path).resolve() if path else here
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target
