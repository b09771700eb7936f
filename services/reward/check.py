"""python -m services.reward.check --config FILE --output report.json: what would prevent rewards.

Scorers are loaded, and those that are built in are asked about the first rows, as a row without an answer can never be
scored. A scorer of the user's own is loaded in a scorer process, with the limits and variables that it will have there.
It is not called: it may be slow, or cost money.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

from services.common.config import Config, RewardConfig, ScorerConfig, SourceConfig, load_config
from services.common.data.rows import Row, metadata, read_rows
from services.common.errors import InvalidData, TrivetError
from services.common.run_files.check_report import CheckReport
from services.common.serving.arguments import leave
from services.reward.isolation.containment import Containment, find_user
from services.reward.isolation.pool import ScorerPool
from services.reward.scorers import BUILT_IN, load_scorer
from services.reward.scorers.types import Scorer, ScorerFailure

ROWS = 1_000
# For one scorer on one source.
SECONDS = 3.0


def find_problems(config: Config) -> list[str]:
    """A sentence for each. Rows are left out while what makes them has not run (prepare)."""
    try:
        find_user(config.reward.scorer_user)
    except InvalidData as error:
        return [str(error)]
    found = []
    for settings in config.reward.scorers:
        try:
            if settings.name not in BUILT_IN:
                asyncio.run(_load_contained(settings, config.reward))
                continue
            scorer = load_scorer(settings)
        except TrivetError as error:
            found.append(str(error))
            continue
        if config.prepare is None or config.prepare.done:
            found += _row_problems(scorer, settings, config)
    return found


async def _load_contained(settings: ScorerConfig, config: RewardConfig) -> None:
    """Raises InvalidData or Unavailable, as the start of the service would."""
    pool = ScorerPool([settings], workers=1, timeout_seconds=config.timeout_seconds, containment=Containment.of(config))
    await pool.start()
    await pool.stop()


def _row_problems(scorer: Scorer, settings: ScorerConfig, config: Config) -> list[str]:
    found = []
    for key, source in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        if source is None:
            continue
        try:
            refused = list(_refused(scorer, source, key))
        except TrivetError:
            # The trainer's check says what is wrong with a source that cannot be read.
            continue
        if refused:
            where, reason = refused[0]
            more = f"; so are {len(refused) - 1} more of its first {ROWS} rows" if len(refused) > 1 else ""
            found.append(f"reward.scorers: {settings.name} cannot score {where} of {key}: {reason}{more}")
    return found


def _refused(scorer: Scorer, source: SourceConfig, key: str) -> Iterator[tuple[str, str]]:
    """Rows that the scorer refuses whatever the completion is, and why."""
    deadline = time.monotonic() + SECONDS
    for row in read_rows(source, key, ROWS):
        outcome = _score_nothing(scorer, row, source.prompt_field)
        if isinstance(outcome, ScorerFailure) and not outcome.retryable:
            yield row.where, outcome.reason
        if time.monotonic() > deadline:
            return


def _score_nothing(scorer: Scorer, row: Row, prompt_field: str) -> float | ScorerFailure | None:
    """None if the scorer cannot score an empty completion; that is not the row's fault."""
    columns, _ = metadata(row, prompt_field)
    try:
        return scorer(str(row.values.get(prompt_field)), "", json.loads(columns))
    except Exception:  # noqa: BLE001
        return None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m services.reward.check")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the report goes, as JSON")
    arguments = parser.parse_args(argv)
    report = CheckReport(findings=tuple(find_problems(load_config(arguments.config))))
    arguments.output.write_text(report.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
    leave(0)
