"""python deploy/grafana/build.py [--check]: writes dashboards/*.json from boards/*.py and docs/runbook.md.

With --check it writes nothing, and fails with the names of the files that are not current.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from boards import data_plane, run, runbook, services, stability

DASHBOARDS = Path(__file__).parent / "dashboards"


def dashboards() -> dict[str, str]:
    """Content by file name."""
    text = runbook.SOURCE.read_text(encoding="utf-8")
    boards = [
        replace(module.BOARD, runbook=runbook.panel_ids(text)) for module in (run, stability, data_plane, services)
    ]
    models = [board.json() for board in boards] + [runbook.runbook_board(text)]
    return {f"{model['uid']}.json": json.dumps(model, indent=2, ensure_ascii=False) + "\n" for model in models}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = dashboards()
    found = {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS.glob("*.json")}
    stale = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if arguments.check and stale:
        sys.exit(f"not current: {', '.join(stale)}; run python deploy/grafana/build.py")
    for name in stale:
        if name in wanted:
            (DASHBOARDS / name).write_text(wanted[name], encoding="utf-8")
        else:
            (DASHBOARDS / name).unlink()


if __name__ == "__main__":
    main()
