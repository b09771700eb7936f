"""Groups of rollouts that take over weights from memory: who is in them, and what a failure costs."""

import pytest
import torch
from prometheus_client import REGISTRY
from trivet.v1 import weights_pb2

from services.common.transport.rollout_registry import RolloutRegistry
from services.trainer.export.tensors import describe
from services.trainer.weights.channels import BroadcastChannel, BufferChannel, cuda_buffer
from services.trainer.weights.transfer import WeightTransfer
from tests.support.rollout.stub import Rollout

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
MODEL = {
    "embed": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "gate": torch.arange(6, dtype=torch.float32),
    "norm": torch.arange(5, dtype=torch.bfloat16),
}
TENSORS = [describe(name, tensor) for name, tensor in MODEL.items()]
BYTES = 24 + 24 + 10
BUFFER = 30


class Broadcasts:
    """A communicator whose members always come; keeps what it sent."""

    def __init__(self):
        self.opened, self.sent, self.aborts = [], [], 0

    def open(self, unique_id, world_size):
        self.opened.append((unique_id, world_size))
        return self

    def broadcast(self, buffer):
        self.sent.append(buffer.clone())

    def synchronize(self): ...

    def abort(self):
        self.aborts += 1


class Buffers:
    """Exports whose handle counts; remembers the bytes that were there at each synchronisation."""

    def __init__(self):
        self.exports, self.collected, self.seen = 0, 0, []

    def export(self, buffer):
        self.exports += 1
        self._buffer = buffer
        arguments = [None] * 15
        arguments[1], arguments[6:10], arguments[11:15] = (
            [buffer.numel()],
            [0, f"handle {self.exports}".encode(), 1, 0],
            [b"counter", 0, b"event", False],
        )
        return cuda_buffer(arguments, "GPU-0")

    def synchronize(self):
        self.seen.append(self._buffer.clone())

    def collect(self):
        self.collected += 1


def failures(code):
    return REGISTRY.get_sample_value("trivet_trainer_weight_transfer_failures_total", {"code": code}) or 0


@pytest.fixture
def registry(redis_client):
    return RolloutRegistry(redis_client, "transfer")


@pytest.fixture
def rollouts(registry):
    """Three, none registered yet."""
    three = [Rollout(f"r{index}", token="a token of the run") for index in range(3)]
    yield three
    for rollout in three:
        rollout.stop()


@pytest.fixture
def broadcasts():
    return Broadcasts()


@pytest.fixture
def buffers():
    return Buffers()


def make(registry, open_channel, **changes):
    arguments = {"token": "a token of the run", "timeout_seconds": 20, **changes}
    return WeightTransfer(registry, open_channel, TENSORS, **arguments)


@pytest.fixture
def broadcast(registry, broadcasts):
    def open_channel():
        return BroadcastChannel(
            TENSORS, BUFFER, CPU, new_unique_id=lambda: b"u" * 128, open_communicator=broadcasts.open
        )

    transfer = make(registry, open_channel)
    yield transfer
    transfer.close()


@pytest.fixture
def shared(registry, buffers):
    def open_channel():
        return BufferChannel(
            TENSORS, BUFFER, CPU, export=buffers.export, synchronize=buffers.synchronize, collect=buffers.collect
        )

    transfer = make(registry, open_channel)
    yield transfer
    transfer.close()


def weights(version):
    return weights_pb2.WeightVersion(version=version, fingerprint=f"m{version}")


def send(transfer, version):
    """Whether all have it; the source is read to its end in any case, as the other ranks gather along."""
    tensors = iter(MODEL.items())
    sent = transfer.send(weights(version), tensors)
    assert next(tensors, None) is None
    return sent


def test_everybody_gets_every_tensor(registry, rollouts, broadcast, broadcasts):
    for rollout in rollouts[:2]:
        registry.renew(rollout.entry)
    rollouts[0].devices = ["", ""]
    registry.renew(rollouts[0].entry)
    assert broadcast.prepare()
    assert broadcast.group == ["r0", "r1"]
    assert broadcasts.opened == [(b"u" * 128, 4)]
    assert [rollout.joins[0].nccl.rank_offset for rollout in rollouts[:2]] == [1, 3]
    assert send(broadcast, 1)
    assert [part.numel() for part in broadcasts.sent] == [48, 10]
    expected = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in MODEL.values()])
    assert torch.equal(torch.cat(broadcasts.sent), expected)
    for rollout in rollouts[:2]:
        assert rollout.steps == ["begin", "part", "finish"]
        assert list(rollout.begun[0].tensors) == TENSORS
        assert rollout.version == 1
    assert broadcasts.aborts == 0


def test_a_group_stays_for_the_next_version(registry, rollouts, broadcast, broadcasts):
    registry.renew(rollouts[0].entry)
    for version in (1, 2, 3):
        assert broadcast.prepare()
        assert send(broadcast, version)
    assert len(broadcasts.opened) == 1
    assert rollouts[0].version == 3


def test_nobody_there_is_no_group_and_no_failure(broadcast):
    assert not broadcast.prepare()
    assert not send(broadcast, 1)
    assert broadcast.group == []


def test_a_late_rollout_is_in_the_next_group(registry, rollouts, broadcast, broadcasts):
    registry.renew(rollouts[0].entry)
    assert broadcast.prepare()
    assert send(broadcast, 1)
    registry.renew(rollouts[1].entry)
    assert broadcast.prepare()
    assert broadcast.group == ["r0", "r1"]
    assert send(broadcast, 2)
    assert [rollout.version for rollout in rollouts[:2]] == [2, 2]
    assert rollouts[0].joins[0].group != rollouts[0].joins[1].group == rollouts[1].joins[0].group
    assert broadcasts.aborts == 1


def test_a_restarted_engine_joins_anew(registry, rollouts, broadcast):
    registry.renew(rollouts[0].entry)
    assert broadcast.prepare()
    rollouts[0].engine = "2"
    registry.renew(rollouts[0].entry)
    assert broadcast.prepare()
    assert len(rollouts[0].joins) == 2


def test_a_rollout_that_left_is_no_longer_in_the_group(registry, rollouts, broadcast):
    for rollout in rollouts[:2]:
        registry.renew(rollout.entry)
    assert broadcast.prepare()
    registry.remove("r0")
    rollouts[0].stop()
    assert broadcast.prepare()
    assert broadcast.group == ["r1"]
    assert send(broadcast, 1)


def test_a_vanished_rollout_is_counted_and_left_out(registry, rollouts, broadcast):
    """Its entry in Redis outlives it for some seconds."""
    for rollout in rollouts[:2]:
        registry.renew(rollout.entry)
    rollouts[0].stop()
    before = failures("unreachable")
    assert not broadcast.prepare()
    assert broadcast.group == ["r1"]
    assert failures("unreachable") == before + 1
    assert send(broadcast, 1)
    # It is not asked again at once, and the group stays.
    assert not broadcast.prepare()
    assert failures("unreachable") == before + 1
    assert len(rollouts[1].joins) == 1


def test_an_engine_that_is_down_is_not_met_with(registry, rollouts, broadcast):
    """The others would wait for it in NCCL, where only a new start gets them out."""
    for rollout in rollouts[:2]:
        registry.renew(rollout.entry)
    rollouts[0].engine = ""
    before = failures("restarting")
    assert not broadcast.prepare()
    assert failures("restarting") == before + 1
    assert broadcast.group == ["r1"]
    assert rollouts[0].joins == []
    rollouts[0].engine = "2"
    registry.renew(rollouts[0].entry)
    assert broadcast.prepare()


@pytest.mark.parametrize("step", ["begin", "part", "finish"])
def test_one_failure_ends_a_broadcast_for_all(registry, rollouts, broadcast, broadcasts, step):
    for rollout in rollouts:
        registry.renew(rollout.entry)
    rollouts[1].fails_at = step
    before = failures("refused")
    assert broadcast.prepare()
    assert not send(broadcast, 1)
    assert failures("refused") == before + 1
    assert broadcasts.aborts >= 1
    assert broadcast.group == []
    # Nobody is left waiting for what does not come.
    assert rollouts[0].abandoned.wait(10)
    assert rollouts[2].abandoned.wait(10)
    # And the next version finds all of them again.
    rollouts[1].fails_at = None
    assert broadcast.prepare()
    assert send(broadcast, 2)
    assert [rollout.version for rollout in rollouts] == [2, 2, 2]


def test_one_failure_leaves_the_others_their_buffer(registry, rollouts, shared, buffers):
    for rollout in rollouts:
        registry.renew(rollout.entry)
    rollouts[1].fails_at = "part"
    before = failures("refused")
    assert shared.prepare()
    assert not send(shared, 1)
    assert failures("refused") == before + 1
    assert shared.group == ["r0", "r2"]
    assert [rollouts[0].version, rollouts[1].version, rollouts[2].version] == [1, None, 1]
    # One export for each: torch counts the readers of an export.
    assert (buffers.exports, buffers.collected) == (3, 1)
    # What lay there: the embedding; the gate; the norm over the gate's first bytes.
    first, second, third = (torch.Tensor.view(part, torch.uint8) for part in buffers.seen)
    assert torch.equal(first.view(torch.bfloat16).reshape(4, 3), MODEL["embed"])
    assert torch.equal(second.view(torch.float32), MODEL["gate"])
    assert torch.equal(third[:10].view(torch.bfloat16), MODEL["norm"])


@pytest.mark.parametrize("step", ["begin", "part", "finish"])
def test_a_rollout_that_hangs_costs_the_time_out_and_no_more(registry, rollouts, broadcasts, step):
    def open_channel():
        return BroadcastChannel(
            TENSORS, BUFFER, CPU, new_unique_id=lambda: b"u" * 128, open_communicator=broadcasts.open
        )

    transfer = make(registry, open_channel, timeout_seconds=0.4)
    registry.renew(rollouts[0].entry)
    rollouts[0].hangs_at = step
    before = failures("timeout")
    assert transfer.prepare()
    assert not send(transfer, 1)
    assert failures("timeout") == before + 1
    transfer.close()


def test_a_group_that_does_not_meet_is_given_up(registry, rollouts):
    """A rollout refuses to join, and so rank 0 waits in vain; or it never answers."""
    waiting = []

    def never(unique_id, world_size):
        import threading

        waiting.append(threading.Event())
        waiting[-1].wait(30)
        raise RuntimeError("the test is over")

    def open_channel():
        return BroadcastChannel(TENSORS, BUFFER, CPU, new_unique_id=lambda: b"u" * 128, open_communicator=never)

    transfer = make(registry, open_channel, timeout_seconds=0.4)
    registry.renew(rollouts[0].entry)
    for attribute, code in (("fails_at", "refused"), ("hangs_at", "timeout")):
        setattr(rollouts[0], attribute, "join")
        before = failures(code)
        assert not transfer.prepare()
        assert failures(code) == before + 1
        assert transfer.group == []
        setattr(rollouts[0], attribute, None)
    for event in waiting:
        event.set()


def test_groups_that_keep_failing_are_tried_less_and_less_often(registry, rollouts, broadcast):
    registry.renew(rollouts[0].entry)
    rollouts[0].fails_at = "join"
    before = failures("refused")
    tries = []
    for _ in range(12):
        broadcast.prepare()
        tries.append(failures("refused") - before)
    assert tries == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 5]
    # Another rollout is a reason to try at once.
    rollouts[0].fails_at = None
    registry.renew(rollouts[1].entry)
    assert broadcast.prepare()


def test_a_tensor_that_is_not_the_announced_one_ends_the_version(registry, rollouts, broadcast):
    registry.renew(rollouts[0].entry)
    assert broadcast.prepare()
    before = failures("invalid")
    assert not broadcast.send(weights(1), iter([*list(MODEL.items())[:2], ("norm", torch.zeros(6))]))
    assert failures("invalid") == before + 1
    assert rollouts[0].version is None


def test_a_rollout_without_the_token_is_counted(registry, rollouts):
    transfer = make(registry, lambda: None, token="another token")
    registry.renew(rollouts[0].entry)
    before = failures("refused")
    assert not transfer.prepare()
    assert failures("refused") == before + 1


def test_an_unsuitable_rollout_is_reported_once_and_gets_its_weights_from_disk(registry, rollouts, broadcasts):
    def open_channel():
        return BroadcastChannel(
            TENSORS, BUFFER, CPU, new_unique_id=lambda: b"u" * 128, open_communicator=broadcasts.open
        )

    def unsuitable(entry):
        return "another GPU" if entry.rollout_id == "r1" else None

    transfer = make(registry, open_channel, unsuitable=unsuitable)
    for rollout in rollouts[:2]:
        registry.renew(rollout.entry)
    before = failures("unsuitable")
    for version in (1, 2):
        # Not all of the living are in the group, so the version goes to disk as well.
        assert not transfer.prepare()
        assert transfer.group == ["r0"]
        assert send(transfer, version)
    assert failures("unsuitable") == before + 1
    assert len(rollouts[0].joins) == 1
    transfer.close()
