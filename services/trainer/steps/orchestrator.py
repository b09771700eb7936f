"""Rank 0's side of the run: prompts out, scored groups in, versions and checkpoints announced."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
from trivet.v1 import sample_pb2, step_pb2, trainer_pb2

from services.common.config import Config
from services.common.errors import Unavailable
from services.common.logs import get_logger
from services.common.transport.blobs import open_blobs
from services.common.transport.dead_letters import DeadLetters
from services.common.transport.outages import Outages
from services.common.transport.streams import RunStreams
from services.common.transport.weight_feed import WeightFeed
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.checkpoint.directory import TrainerState
from services.trainer.data.prompts import PromptData
from services.trainer.metrics import counters
from services.trainer.steps.deaths import Deaths
from services.trainer.steps.evaluation import Evaluation
from services.trainer.steps.intake import Intake
from services.trainer.steps.issuer import Issuer
from services.trainer.steps.ledger import Ledger
from services.trainer.steps.source import Order
from services.trainer.steps.status import Controls, Status
from services.trainer.steps.verification import Verifier

CONSUMER = "trainer"
POLL_SECONDS = 1.0
# Without an arrival for so long, what is outstanding is looked for.
RECONCILE_SECONDS = 60.0
# Likewise, a version that is in memory alone goes to disk.
PUBLISH_AGAIN_SECONDS = 30.0
# How often one version is published again because a rollout found it damaged.
MAX_REPAIRS = 3

WAIT = Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_WAIT))

log = get_logger(__name__)


@dataclass
class Orchestrator:
    """A StepSource: steps are made of what rollouts sampled and rewards scored."""

    config: Config
    data: PromptData
    client: redis.Redis
    status: Status
    controls: Controls
    facts: ModelFacts
    # Dynamic sampling: how many batches of groups without variance may be replaced before a step.
    filtered_rounds: int = 0
    deaths: Deaths | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.ledger = Ledger(config.trainer.groups_per_step, config.trainer.max_staleness)
        streams = RunStreams(self.client, config.run.name, config.redis)
        self._prompts, self._samples = streams.prompts(CONSUMER), streams.samples(CONSUMER)
        self._scored = streams.scored(CONSUMER)
        self._issuer = Issuer(config, self.data)
        self.feed = WeightFeed(self.client, config.run.name)
        self.step = 0
        # Rollouts may still sample under what was published before this start, also after the checkpoint's step.
        published = self.feed.newest_version()
        # Of outstanding groups, the version that each was last issued at, as far as this process knows.
        self._issued_at: dict[int, int] = {}
        # After as long without a group the run ends.
        self.outages = self.status.outages = Outages(config.trainer.batch_timeout_seconds)
        self._verifier = Verifier(
            self._issuer, config.reward, lambda: (self._oldest_version, max(self.step, published))
        )
        # Seconds of waiting without an arrival, and since what is outstanding was last looked for.
        self._silence = self._unreconciled = 0.0
        # The version that was last published again because it was damaged, and how often.
        self._repaired = (-1, 0)
        self.intake = Intake(
            self._scored,
            DeadLetters(self.client, config.run.name),
            open_blobs(config.blobs, self.client, config.run.name),
            self.ledger,
            verifier=self._verifier,
            facts=self.facts,
            deaths=self.deaths,
            issuer=self._issuer,
            reissue=self._reissue,
            max_lost=config.trainer.max_lost_groups,
            max_filtered=self.filtered_rounds * config.trainer.groups_per_step,
        )

    @property
    def history(self) -> str:
        return self._issuer.history

    @property
    def data_version(self) -> str:
        return self.data.version

    def dump(self) -> dict[str, Any]:
        return {**self.ledger.dump(), "sampling": self._verifier.dump()}

    def commit(self) -> None:
        self.outages.ride_out_blocking(lambda: self.intake.commit(finished=self._steps_left == 0))

    def held_out(self) -> Order:
        return Order(step_pb2.StepOrder())

    def restore(self, state: TrainerState) -> None:
        """Resumes from a checkpoint: takes what has arrived, and reissues what cannot be found anywhere."""
        self.step, self._issuer.history = state.step, state.history
        self.ledger.restore(state.ledger)
        self._verifier.restore(state.ledger.get("sampling", []))
        self.outages.poll(self.intake.recover)
        withheld = self.ledger.withhold(self._steps_left, self.intake.held_requests())
        if withheld:
            log.warning("more groups are outstanding than the staleness bound allows: put back", groups=len(withheld))
        counters.GROUPS_REISSUED.labels("withheld").inc(len(withheld))
        self.intake.release(withheld)
        self.outages.poll(self.reconcile)

    def issue(self) -> None:
        """As many prompts as the staleness bound allows and the run still needs; none while Redis accepts none."""
        self.outages.poll(self._issue)

    def next_order(self) -> Order:
        """What all ranks do next; WAIT at least once a second. Raises Unavailable when nothing arrives any more."""
        if self.controls.stop.is_set():
            return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_STOP))
        if self.controls.save_requested:
            return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_SAVE))
        return self.outages.poll(self._order) or WAIT

    def evaluate(self) -> dict[str, float] | None:
        """Issues the validation prompts and waits for them; None when the run is stopped meanwhile.

        Nothing is published meanwhile, so every completion is of the same version. Raises Unavailable when nothing
        comes for too long.
        """
        self.status.state = trainer_pb2.TRAINER_STATE_EVALUATING
        # A repeated evaluation of a step, after a restart, must not take the earlier one's results.
        evaluation_id = f"e{self.step}-{time.time_ns():x}"
        prompts = self._issuer.evaluation_prompts(evaluation_id, self.step)
        expected = {prompt.group_id: prompt for prompt in prompts}
        evaluation = Evaluation(evaluation_id, self.config.evaluation.success_reward, expected, self._prompts.add)
        self.intake.evaluation = evaluation
        self.outages.ride_out_blocking(lambda: self._prompts.add_all(prompts))
        patience = self.config.evaluation.timeout_seconds
        deadline = time.monotonic() + patience
        look = time.monotonic() + RECONCILE_SECONDS
        while not evaluation.done:
            if self.controls.stop.is_set():
                return None
            if time.monotonic() > deadline:
                raise Unavailable(
                    "evaluation_timeout",
                    f"{len(evaluation.missing)} of {len(expected)} evaluation groups are missing, and nothing came for "
                    f"{patience:.0f} s (evaluation.timeout_seconds); entries waiting: {self.backlog()}",
                )
            # An outage, where it is None, has a limit of its own.
            if self.outages.poll(self._poll) != 0:
                deadline = time.monotonic() + patience
                look = time.monotonic() + RECONCILE_SECONDS
            elif time.monotonic() > look:
                look = time.monotonic() + RECONCILE_SECONDS
                self.outages.poll(lambda: self._reconcile_evaluation(evaluation))
        self.intake.evaluation = None
        return evaluation.metrics()

    def reconcile(self) -> None:
        """Issues again every outstanding group that no stream, buffer or dead letter holds."""
        attempts = dict(self.ledger.outstanding)
        alive = {self._issuer.request_of(prompt.group_id): prompt.min_version for prompt in self._under_way()}
        self.intake.read_dead_letters()
        self._issued_at = {request: alive[request] for request in self.ledger.outstanding if request in alive}
        for request in sorted(attempts.keys() - alive.keys() - self.intake.held_requests()):
            # A dead letter may have lost it meanwhile, or had it issued again.
            if self.ledger.outstanding.get(request) != attempts[request]:
                continue
            log.warning("outstanding group is nowhere, issued again", request=request)
            counters.GROUPS_REISSUED.labels("vanished").inc()
            self._reissue(request)

    def backlog(self) -> str:
        return ", ".join(f"{stream.label} {stream.depth()}" for stream in (self._prompts, self._samples, self._scored))

    def _issue(self) -> None:
        requests = self.ledger.next_requests(self.ledger.room(self._steps_left))
        # First of all into the stream: what it does not take was not issued.
        self._prompts.add_all(
            [self._issuer.training_prompt(request, attempt, self.step) for request, attempt in requests.items()]
        )
        for _ in requests:
            self.ledger.issue()
        self._issued_at |= dict.fromkeys(requests, self.step)
        counters.GROUPS_ISSUED.inc(len(requests))
        self._show()

    def _order(self) -> Order:
        if self.controls.paused:
            self.status.state = trainer_pb2.TRAINER_STATE_PAUSED
            self._poll()
            return WAIT
        self._issue()
        self.intake.reissue_older(self._oldest_version)
        if self.intake.ready < self.config.trainer.groups_per_step or self._overtakes():
            self.status.state = trainer_pb2.TRAINER_STATE_WAITING
            self._wait_for_news()
            # The rollouts that had a version in memory may all have been started again.
            if (self._silence > PUBLISH_AGAIN_SECONDS and self.feed.only_in_memory) or self._repairs():
                return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_PUBLISH))
            return WAIT
        self.status.state = trainer_pb2.TRAINER_STATE_TRAINING
        arrivals = self.intake.take(self.config.trainer.groups_per_step)
        message = step_pb2.StepOrder(
            action=step_pb2.STEP_ACTION_TRAIN,
            groups=[arrival.scored for arrival in arrivals],
            replay=[data for arrival in arrivals for data in arrival.replays],
        )
        return Order(message, [sample for arrival in arrivals for sample in arrival.samples])

    def _reconcile_evaluation(self, evaluation: Evaluation) -> None:
        alive = {prompt.group_id for prompt in self._under_way()}
        self.intake.read_dead_letters()
        for group_id in evaluation.issue_vanished(alive):
            log.warning("evaluation group is nowhere, issued again", group=group_id)
            counters.GROUPS_REISSUED.labels("vanished").inc()

    def _under_way(self) -> Iterator[sample_pb2.Prompt]:
        """Groups only move forward, so looking in the order of the flow misses none of them."""
        yield from self._prompts.scan()
        yield from (group.prompt for group in self._samples.scan())
        yield from (scored.group.prompt for scored in self._scored.scan())

    @property
    def _steps_left(self) -> int:
        return self.config.trainer.steps - self.step

    @property
    def _oldest_version(self) -> int:
        """That a step may be made of now."""
        return self.step - self.config.trainer.max_staleness

    def _overtakes(self) -> bool:
        """Whether a step taken now would leave a group behind that is too stale for the next one.

        It is waited for, because groups that take long would otherwise never be trained on; but not forever.
        """
        if self._silence > self.config.trainer.batch_timeout_seconds / 2:
            return False
        under_way = self.ledger.outstanding.keys() - self.intake.held_requests()
        return any(self._issued_at.get(request, self.step) <= self._oldest_version for request in under_way)

    def _repairs(self) -> bool:
        """Whether the newest version is to be published again: a rollout found its files damaged."""
        if not self.feed.take_damaged():
            return False
        times = self._repaired[1] if self._repaired[0] == self.step else 0
        log.warning("a rollout found the published version damaged", version=self.step, published_again=times)
        if times >= MAX_REPAIRS:
            return False
        self._repaired = (self.step, times + 1)
        counters.VERSIONS_REPAIRED.inc()
        return True

    def _poll(self) -> int:
        found = self.intake.poll(POLL_SECONDS)
        if not found:
            # Redis may have lost it, and a rollout that starts now would wait for it.
            self.feed.keep_announced()
        return found

    def _wait_for_news(self) -> None:
        """Only time spent waiting counts: a long step does not count as silence."""
        started = time.monotonic()
        if self._poll():
            self._silence = self._unreconciled = 0.0
        else:
            waited = time.monotonic() - started
            self._silence += waited
            self._unreconciled += waited
        if self._silence > self.config.trainer.batch_timeout_seconds:
            raise Unavailable(
                "batch_timeout",
                f"no scored group for {self._silence:.0f} s of waiting (trainer.batch_timeout_seconds); "
                f"entries waiting: {self.backlog()}",
            )
        if self._unreconciled > RECONCILE_SECONDS:
            self._unreconciled = 0.0
            self.reconcile()
        self._show()

    def _reissue(self, request: int, failed: int = 0) -> None:
        # First of all into the stream: what it does not take was not issued.
        attempt = self.ledger.next_attempt(request, failed)
        self._prompts.add(self._issuer.training_prompt(request, attempt, self.step))
        self.ledger.reissue(request, failed)
        self._issued_at[request] = self.step

    def _show(self) -> None:
        self.status.groups_issued = self.ledger.cursor
        self.status.groups_trained = self.ledger.trained
        self.status.groups_in_flight = len(self.ledger.outstanding)
        counters.GROUPS_IN_FLIGHT.set(len(self.ledger.outstanding))
