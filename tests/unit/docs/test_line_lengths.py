"""Lines of the documentation fit, tables aside."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LENGTH = 120
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > LENGTH and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_fit(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []
