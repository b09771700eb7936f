"""python -m services.reward.check --config FILE --output report.json: what would prevent rewards.

Scorers that are built in are asked about the first rows, as a row without an answer can never be scored. Then all of
them score three rows in a scorer process, with the limits and variables that they will have there.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from trivet.v1 import reward_pb2, sample_pb2

from services.common.config import Config, RewardConfig, ScorerConfig, SourceConfig
from services.common.data.rows import Row, metadata, read_rows
from services.common.errors import InvalidData, TrivetError
from services.common.run_files.check_report import CheckReport
from services.common.serving.arguments import check_module
from services.common.wire.group import sample_id
from services.reward.isolation.containment import Containment, find_user
from services.reward.isolation.pool import ScorerPool
from services.reward.score import GroupScorer
from services.reward.scorers import BUILT_IN, load_scorer
from services.reward.scorers.types import Scorer, ScorerFailure
from services.reward.stats import RewardStats

ROWS = 1_000
# For one scorer on one source.
SECONDS = 3.0
CALLED_ROWS, CALL_SECONDS = 3, 60.0


def report(config: Config) -> CheckReport:
    """Rows are left out while what makes them has not run (prepare)."""
    try:
        find_user(config.reward.scorer_user)
    except InvalidData as error:
        return CheckReport(findings=(str(error),))
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
    if found or config.data.train is None or not (config.prepare is None or config.prepare.done):
        return CheckReport(findings=tuple(found))
    return asyncio.run(_call(config.reward, config.data.train))


async def _load_contained(settings: ScorerConfig, config: RewardConfig) -> None:
    """Raises InvalidData or Unavailable, as the start of the service would."""
    async with _started([settings], config):
        pass


async def _call(config: RewardConfig, source: SourceConfig) -> CheckReport:
    """Scores a few rows as the service would. The answer is the completion, so that a full reward is given, too."""
    try:
        rows = list(read_rows(source, "data.train", CALLED_ROWS))
    except TrivetError:
        # The trainer's check says what is wrong with a source that cannot be read.
        rows = []
    if not rows:
        return CheckReport()
    try:
        async with asyncio.timeout(CALL_SECONDS), _started(config.scorers, config) as pool:
            scorer = GroupScorer(config, pool, RewardStats(), "check")
            for row in rows:
                outcome = await scorer.score(_group(row, source.prompt_field))
                if isinstance(outcome, reward_pb2.ScoreFailure):
                    where = f"{outcome.scorer} cannot score {row.where} of data.train"
                    return CheckReport(findings=(f"reward.scorers: {where}: {outcome.reason}",))
    except TimeoutError:
        late = f"reward.scorers: {len(rows)} rows were not scored within {CALL_SECONDS:.0f} s: not checked further"
        return CheckReport(doubts=(late,))
    except TrivetError as error:
        return CheckReport(findings=(str(error),))
    return CheckReport()


@asynccontextmanager
async def _started(scorers: Sequence[ScorerConfig], config: RewardConfig) -> AsyncIterator[ScorerPool]:
    pool = ScorerPool(scorers, workers=1, timeout_seconds=config.timeout_seconds, containment=Containment.of(config))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def _group(row: Row, prompt_field: str) -> sample_pb2.Group:
    columns, _ = metadata(row, prompt_field)
    prompt = str(row.values.get(prompt_field))
    completion = str(row.values.get("answer", prompt))
    group = sample_pb2.Group(prompt=sample_pb2.Prompt(group_id="check", text=prompt, metadata_json=columns))
    group.samples.add(sample_id=sample_id(group.prompt, 0), text=completion)
    return group


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


if __name__ == "__main__":
    check_module("reward", report)
