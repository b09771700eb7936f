"""Steps made of preference pairs from a file: no rollout, no reward, no Redis."""

import uuid
from dataclasses import dataclass
from typing import Any

from trivet.v1 import sample_pb2, step_pb2, trainer_pb2

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.run_files.lineage import code_version, config_version
from services.trainer.checkpoint.directory import TrainerState
from services.trainer.data.preferences import PairRow, PreferenceData
from services.trainer.metrics import counters
from services.trainer.steps.deaths import Deaths
from services.trainer.steps.source import Order
from services.trainer.steps.status import Controls, Status

POLL_SECONDS = 1.0
CHOSEN_REWARD, REJECTED_REWARD = 1.0, 0.0

log = get_logger(__name__)


@dataclass
class PairFeed:
    """A StepSource. A pair is a group of two answers, scored 1 and 0; the cursor alone decides which comes next."""

    config: Config
    data: PreferenceData
    status: Status
    controls: Controls
    deaths: Deaths | None = None

    def __post_init__(self) -> None:
        self.step = self._cursor = 0
        self.history = uuid.uuid4().hex[:8]
        self._lineage = sample_pb2.Lineage(
            data=self.data.version, code=code_version(), config=config_version(self.config)
        )

    @property
    def data_version(self) -> str:
        return self.data.version

    def restore(self, state: TrainerState) -> None:
        self.step, self.history, self._cursor = state.step, state.history, int(state.ledger["cursor"])
        self._show()

    def issue(self) -> None:
        """There is no service to ask."""

    def next_order(self) -> Order:
        if self.controls.stop.is_set():
            return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_STOP))
        if self.controls.save_requested:
            return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_SAVE))
        if self.controls.paused:
            self.status.state = trainer_pb2.TRAINER_STATE_PAUSED
            self.controls.stop.wait(POLL_SECONDS)
            return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_WAIT))
        self.status.state = trainer_pb2.TRAINER_STATE_TRAINING
        requests = self._next_requests()
        self._show()
        return self._order([(f"{self.history}-{request}", request, self.data.train[request]) for request in requests])

    def evaluate(self) -> dict[str, float] | None:
        return None

    def held_out(self) -> Order:
        self.status.state = trainer_pb2.TRAINER_STATE_EVALUATING
        rows = self.data.validation.rows[: self.config.evaluation.prompts]
        return self._order([(f"{self.history}-held-out-{index}", index, row) for index, row in enumerate(rows)])

    def dump(self) -> dict[str, Any]:
        return {"cursor": self._cursor}

    def commit(self) -> None:
        """Nothing waits for a checkpoint: the file stays where it is."""

    def _next_requests(self) -> list[int]:
        """Without those in whose steps the trainer ended too often."""
        requests: list[int] = []
        while len(requests) < self.config.trainer.groups_per_step:
            request, self._cursor = self._cursor, self._cursor + 1
            try:
                if self.deaths is not None:
                    self.deaths.check(request)
                requests.append(request)
            except InvalidData as error:
                log.warning("pair left out", pair=self.data.train[request].pair_id, code=error.code, reason=str(error))
                counters.GROUPS_LOST.labels(error.code).inc()
        return requests

    def _order(self, rows: list[tuple[str, int, PairRow]]) -> Order:
        groups = [self._group(group_id, request, row) for group_id, request, row in rows]
        replay = [b""] * sum(len(each.scores) for each in groups)
        return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_TRAIN, groups=groups, replay=replay))

    def _group(self, group_id: str, request: int, row: PairRow) -> sample_pb2.ScoredGroup:
        prompt = sample_pb2.Prompt(
            group_id=group_id,
            request=request,
            prompt_id=row.pair_id,
            purpose=sample_pb2.PURPOSE_TRAIN,
            token_ids=row.prompt_token_ids,
            text=row.text,
            group_size=2,
            lineage=self._lineage,
        )
        answers = ((row.chosen, row.chosen_token_ids), (row.rejected, row.rejected_token_ids))
        samples = [
            sample_pb2.Sample(
                sample_id=f"{group_id}-{index}",
                index=index,
                token_ids=token_ids,
                text=text,
                finish_reason=sample_pb2.FINISH_REASON_STOP,
            )
            for index, (text, token_ids) in enumerate(answers)
        ]
        return sample_pb2.ScoredGroup(
            group=sample_pb2.Group(prompt=prompt, samples=samples, lineage=self._lineage),
            scores=[sample_pb2.Score(reward=reward, raw_reward=reward) for reward in (CHOSEN_REWARD, REJECTED_REWARD)],
        )

    def _show(self) -> None:
        self.status.groups_issued = self.status.groups_trained = self._cursor
