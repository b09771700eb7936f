"""Scored groups in: each counted once, none lost, bad ones named."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from trivet.v1 import sample_pb2

from services.common.errors import GaveUp, InvalidData, Outage, entrys_fault
from services.common.logs import get_logger
from services.common.transport.blobs import Blob, BlobStore
from services.common.transport.dead_letters import DeadLetters
from services.common.transport.streams import Entry, Stream
from services.common.wire.group import sample_id
from services.trainer.batch.groups import decode_group
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.rewards import has_variance
from services.trainer.batch.samples import TrainSample
from services.trainer.metrics import counters
from services.trainer.steps.deaths import TRAINER_ENDED, Deaths
from services.trainer.steps.evaluation import Evaluation
from services.trainer.steps.issuer import Issuer
from services.trainer.steps.ledger import Ledger
from services.trainer.steps.verification import (
    PROMPT_MISMATCH,
    SAMPLING_MISMATCH,
    TOO_STALE,
    VERSION_ABANDONED,
    VERSION_UNKNOWN,
    Verifier,
    sampled_versions,
)

READ_AT_ONCE = 64
MAX_REISSUES = 3
# Nothing is wrong with the prompt: sampling again helps.
REISSUED_CODES = {"blob_missing", "blob_corrupt", TOO_STALE, PROMPT_MISMATCH, SAMPLING_MISMATCH, VERSION_UNKNOWN}
# What ends its consumers time and again is not given another round by their restarts.
FATAL_CODES = {"too_many_deliveries", TRAINER_ENDED}

log = get_logger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A scored group that passed every check: as it came, which is what other ranks and a recording get of it, and
    decoded, which is what rank 0 trains on.
    """

    entry_id: str
    scored: sample_pb2.ScoredGroup
    replays: tuple[bytes, ...]
    samples: tuple[TrainSample, ...]

    @property
    def request(self) -> int:
        return self.scored.group.prompt.request

    @property
    def oldest_version(self) -> int:
        return sampled_versions(self.scored)[0]


class Intake:
    """Holds arrivals until a step takes them, and their stream entries until a checkpoint holds them."""

    def __init__(
        self,
        stream: Stream[sample_pb2.ScoredGroup],
        dead_letters: DeadLetters,
        blobs: BlobStore,
        ledger: Ledger,
        *,
        verifier: Verifier,
        facts: ModelFacts,
        deaths: Deaths | None,
        issuer: Issuer,
        reissue: Callable[[int, int], None],
        max_lost: int,
        max_filtered: int = 0,
    ) -> None:
        """Up to `max_filtered` groups whose rewards are all the same are replaced before each step."""
        self._stream, self._dead_letters, self._blobs, self._ledger = stream, dead_letters, blobs, ledger
        self._verifier, self._facts, self._deaths, self._issuer = verifier, facts, deaths, issuer
        self._reissue, self._max_lost = reissue, max_lost
        self._max_filtered, self._filtered = max_filtered, 0
        self._lost_in_a_row = 0
        # Under way since before the start, and so perhaps under another configuration.
        self._inherited: set[int] = set()
        self._ready: list[Arrival] = []
        self._held: list[Entry[sample_pb2.ScoredGroup]] = []
        # Entries that a checkpoint lets go of.
        self._trained: list[str] = []
        self.evaluation: Evaluation | None = None

    @property
    def ready(self) -> int:
        return len(self._ready)

    def recover(self) -> None:
        """Takes up what was read before a restart and is not held by a checkpoint.

        What was under way then is issued again where it is refused: nothing is wrong with its prompt when, say, the
        limit of a sample's length or the range of rewards has changed.
        """
        self._inherited = self._ledger.outstanding.keys() | self._ledger.withheld.keys()
        self._accept_all(self._stream.recover())

    def poll(self, block_seconds: float) -> int:
        """Reads what has come and returns how many entries. Raises GaveUp after too many lost groups in a row,
        and Outage when Redis or the blobs cannot serve: to be called again then."""
        entries, self._held = self._held or self._stream.read(READ_AT_ONCE, block_seconds), []
        self._accept_all(entries)
        self._stream.settle(entry.id for entry in entries)
        self.read_dead_letters()
        return len(entries)

    def take(self, count: int) -> list[Arrival]:
        """The `count` oldest, by version and then by arrival; they count as trained from here on."""
        self._ready.sort(key=lambda arrival: arrival.oldest_version)
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._ledger.train([arrival.request for arrival in taken])
        self._trained += [arrival.entry_id for arrival in taken]
        self._filtered = 0
        return taken

    def reissue_older(self, version: int) -> None:
        """Has groups of an older version sampled again: they became too stale while they waited for their step."""
        for arrival in [arrival for arrival in self._ready if arrival.oldest_version < version]:
            self._reissue(arrival.request, arrival.scored.group.prompt.attempt)
            counters.GROUPS_REISSUED.labels(TOO_STALE).inc()
            self.release([arrival.request])

    def release(self, requests: Collection[int]) -> None:
        """Lets go of those that are to be sampled again later."""
        for arrival in [arrival for arrival in self._ready if arrival.request in requests]:
            self._ready.remove(arrival)
            self._stream.ack([arrival.entry_id])

    def commit(self, *, finished: bool = False) -> None:
        """To be called once a checkpoint that holds the trained groups is durable.

        Where the run is `finished`, groups that it never issued are over, too: those of steps after the checkpoint from
        which it once resumed.
        """
        self._stream.ack(self._trained)
        self._blobs.sweep(lambda group_id: self._is_over(group_id, finished))
        self._trained = []

    def held_requests(self) -> set[int]:
        return {arrival.request for arrival in self._ready}

    def read_dead_letters(self) -> None:
        letters = self._dead_letters.read()
        for letter in letters:
            self._give_up(letter)
        if letters:
            self._dead_letters.mark_read()

    def _accept_all(self, entries: Iterable[Entry[sample_pb2.ScoredGroup]]) -> None:
        """What cannot be processed because of an outage is held until the next poll."""
        coming = iter(entries)
        for entry in coming:
            try:
                self._accept(entry)
            except Outage:
                self._held = [entry, *coming]
                raise

    def _accept(self, entry: Entry[sample_pb2.ScoredGroup]) -> None:
        prompt = entry.message.group.prompt
        # What a group is goes by its id, which is compared with what was issued, and not by what else it says.
        request = self._issuer.request_of(prompt.group_id)
        if request is None and prompt.purpose == sample_pb2.PURPOSE_EVALUATION:
            self._accept_evaluation(entry)
        elif request is None:
            counters.GROUPS_STALE.inc()
            self._stream.ack([entry.id])
        elif not self._ledger.is_outstanding(request) or request in self.held_requests():
            counters.GROUPS_DUPLICATE.inc()
            self._stream.ack([entry.id])
        else:
            self._accept_training(entry, request)

    def _accept_evaluation(self, entry: Entry[sample_pb2.ScoredGroup]) -> None:
        issued = self.evaluation.awaited(entry.message.group.prompt.group_id) if self.evaluation else None
        if self.evaluation is not None and issued is not None:
            try:
                with entrys_fault():
                    self._verifier.check_evaluation(entry.message, issued)
                    self.evaluation.add(entry.message)
            except InvalidData as error:
                if error.code != VERSION_ABANDONED:
                    self._stream.dead_letter(entry, error)
                    return
                log.warning("evaluated again", group=issued.group_id, reason=str(error))
                counters.GROUPS_REISSUED.labels(error.code).inc()
                self.evaluation.issue_again(issued.group_id)
        self._stream.ack([entry.id])

    def _accept_training(self, entry: Entry[sample_pb2.ScoredGroup], request: int) -> None:
        try:
            with entrys_fault():
                self._verifier.check_training(entry.message, request)
                if self._deaths is not None:
                    self._deaths.check(request)
            replays = tuple(self._blobs.get(blob) for blob in _blobs(entry.message))
            with entrys_fault():
                samples = tuple(decode_group(entry.message, replays, self._facts))
        except InvalidData as error:
            self._refuse(entry, request, error)
            return
        self._lost_in_a_row = 0
        if self._filtered < self._max_filtered and not has_variance(entry.message):
            self._filter(entry, request)
        else:
            self._ready.append(Arrival(entry.id, entry.message, replays, samples))

    def _refuse(self, entry: Entry[sample_pb2.ScoredGroup], request: int, error: InvalidData) -> None:
        prompt = entry.message.group.prompt
        log.warning("group refused", group=prompt.group_id, code=error.code, reason=str(error))
        if self._ledger.awaits(request, prompt.attempt):
            helps = error.code in REISSUED_CODES and self._ledger.outstanding[request] < MAX_REISSUES
            if not self._sampled_again(request, prompt.attempt, error.code, helps):
                self._stream.dead_letter(entry, error)
                return
        self._stream.ack([entry.id])

    def _sampled_again(self, request: int, attempt: int, code: str, helps: bool = False) -> bool:
        """Issued again once if it was under way before the start, else where that `helps`."""
        if code in FATAL_CODES or (request not in self._inherited and not helps):
            return False
        self._reissue(request, attempt)
        self._inherited.discard(request)
        counters.GROUPS_REISSUED.labels(code).inc()
        return True

    def _filter(self, entry: Entry[sample_pb2.ScoredGroup], request: int) -> None:
        """Dynamic sampling: a group without variance teaches nothing, and a fresh prompt replaces it."""
        self._filtered += 1
        self._ledger.lose(request)
        counters.GROUPS_FILTERED.inc()
        self._stream.ack([entry.id])

    def _give_up(self, letter: sample_pb2.DeadLetter) -> None:
        """Letters may be read more than once: what one is about has been replaced or lost by then."""
        log.warning("dead letter", stream=letter.stream, group=letter.group_id, code=letter.code, reason=letter.reason)
        request = self._issuer.request_of(letter.group_id)
        if request is not None and self._ledger.awaits(request, letter.attempt) and request not in self.held_requests():
            if self._sampled_again(request, letter.attempt, letter.code):
                return
            counters.GROUPS_LOST.labels(letter.code).inc()
            self._ledger.lose(request)
            # A whole step of groups, of which one at most is to blame, says nothing about the others to come.
            self._lost_in_a_row += letter.code != TRAINER_ENDED
            if self._lost_in_a_row > self._max_lost:
                raise GaveUp(
                    "too_many_lost_groups",
                    f"{self._lost_in_a_row} groups in a row were given up, at most {self._max_lost} allowed "
                    f"(trainer.max_lost_groups); the last one because {letter.code}: {letter.reason}",
                )
        elif request is None and self.evaluation is not None:
            self.evaluation.fail(letter.group_id, letter.code, letter.reason, attempt=letter.attempt)

    def _is_over(self, group_id: str, finished: bool) -> bool:
        request = self._issuer.request_of(group_id)
        if request is None:
            return self._issuer.is_of_another_history(group_id)
        return finished or self._ledger.is_over(request)


def _blobs(scored: sample_pb2.ScoredGroup) -> list[Blob]:
    """Each is compared with the id that the sample has by its position, whatever id the message gives."""
    prompt = scored.group.prompt
    return [Blob(sample_id(prompt, sample.index), sample.replay) for sample in scored.group.samples]
