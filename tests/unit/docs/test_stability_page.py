"""What the pages say about learning rests on more than one run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ACCURACY = re.compile(r"0\.\d+")


def table_rows(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose header line starts with `header`."""
    lines = page[page.index(header) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_training_result_names_the_runs_of_several_seeds() -> None:
    page = (ROOT / "docs/stability.md").read_text()
    regimes = table_rows(page, "| max_staleness |")
    variants = table_rows(page, "| variant |")
    assert len(regimes) >= 5
    assert len(variants) >= 9
    for cell in [cell for row in regimes for cell in row[-2:]] + [row[1] for row in variants]:
        assert len(ACCURACY.findall(cell)) >= 2, f"{cell!r} rests on one run"


def test_the_withdrawn_claim_is_nowhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = " ".join(path.read_text().split())
        assert "went on learning" not in text, path.name
        assert "stable while it scales" not in text, path.name
