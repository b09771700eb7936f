"""One fault has one code, and docs/architecture.md lists them all."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trivet.v1 import sample_pb2, tensor_pb2

from services.common.errors import InvalidData
from services.common.wire.replay_data import CandidateSets, Replay, encode_replay
from services.trainer.batch.groups import check_scored_group, decode_group
from tests.support.shapes import unchecked
from tests.support.trainer.scored_groups import COMPLETION, FACTS, PROMPT, replay_of, scored_group

PAGE = Path(__file__).parents[4] / "docs" / "architecture.md"
ROUTING = np.tile(np.asarray([[0, 1], [2, 7]], np.uint8), (len(PROMPT) + len(COMPLETION) - 1, 1, 1))
SETS = CandidateSets(np.ones(len(COMPLETION), np.int32), np.asarray(COMPLETION, np.int32))


def first(**fields):
    def change(scored):
        for name, value in fields.items():
            setattr(scored.group.samples[0], name, value)

    return change


def first_logprob(value):
    return lambda scored: scored.group.samples[0].logprobs.__setitem__(0, value)


GROUP_FAULTS = {
    "group_id": lambda scored: scored.group.prompt.ClearField("group_id"),
    "group_size": lambda scored: scored.group.samples.pop(),
    "sample_index": first(index=1),
    "sample_id": first(sample_id="h-3/1/0"),
    "logprobs_rows": lambda scored: scored.group.samples[0].logprobs.pop(),
    "logprob_not_finite": first_logprob(float("nan")),
    "logprob_out_of_range": first_logprob(1.0),
    "scores_rows": lambda scored: scored.scores.pop(),
    "reward_not_finite": lambda scored: setattr(scored.scores[1], "raw_reward", float("nan")),
    "completion_length": lambda scored: setattr(scored.group.prompt.sampling, "max_tokens", 3),
    "finish_reason": first(finish_reason=sample_pb2.FINISH_REASON_UNSPECIFIED),
    "version_spans": lambda scored: scored.group.samples[0].versions.pop(),
    "token_out_of_range": lambda scored: scored.group.samples[0].token_ids.__setitem__(0, FACTS.vocabulary),
}


def replay(routing=ROUTING, counts=SETS.counts, ids=SETS.token_ids):
    with unchecked():
        return encode_replay("h-3/0/0", Replay(routing, CandidateSets(np.asarray(counts), np.asarray(ids, np.int32))))


def tensor(**fields):
    routing = {"dtype": "uint8", "shape": ROUTING.shape, "codec": tensor_pb2.CODEC_RAW, "data": ROUTING.tobytes()}
    message = tensor_pb2.ReplayData(sample_id="h-3/0/0", routing=tensor_pb2.Tensor(**{**routing, **fields}))
    return message.SerializeToString()


REPLAY_FAULTS = {
    "blob_corrupt": b"\xff\xff",
    "blob_mismatch": replay_of("h-3/0/1"),
    "tensor_dtype": tensor(dtype="object"),
    "tensor_shape": tensor(shape=[1] * 9),
    "tensor_size": tensor(data=b"1"),
    "tensor_codec": tensor(codec=7),
    "tensor_corrupt": tensor(codec=tensor_pb2.CODEC_ZSTD),
    "routing_missing": encode_replay("h-3/0/0", Replay(None, SETS)),
    "routing_shape": replay(routing=ROUTING[:, :1]),
    "routing_rows": replay(routing=ROUTING[1:]),
    "routing_duplicate": replay(routing=np.zeros_like(ROUTING)),
    "expert_out_of_range": replay(routing=ROUTING + np.uint8(FACTS.experts)),
    "candidates_missing": encode_replay("h-3/0/0", Replay(ROUTING)),
    "candidates_shape": replay(counts=SETS.counts.astype(np.int64)),
    "candidates_rows": replay(counts=SETS.counts[1:], ids=SETS.token_ids[1:]),
    "candidates_counts": replay(ids=SETS.token_ids[1:]),
    "candidate_duplicate": replay(counts=SETS.counts * 2, ids=np.repeat(SETS.token_ids, 2)),
    "candidate_out_of_range": replay(
        counts=SETS.counts * 2, ids=np.stack([SETS.token_ids, SETS.token_ids + FACTS.vocabulary], axis=1).ravel()
    ),
    "token_outside_candidates": replay(ids=SETS.token_ids + 1),
}


def decode(scored, data):
    check_scored_group(scored)
    return decode_group(scored, [data, replay_of("h-3/0/1")], FACTS)


def test_a_sound_group_is_decoded_as_it_was_scored():
    scored = scored_group()
    one, other = decode(scored, replay())
    assert (one.sample_id, other.sample_id) == ("h-3/0/0", "h-3/0/1")
    assert (one.prompt_token_ids.tolist(), one.token_ids.tolist()) == (PROMPT, COMPLETION)
    assert (one.reward, other.reward, one.advantage) == (0.0, 1.0, 0.0)
    assert (one.truncated, one.max_tokens, one.temperature) == (True, 4, 1.0)
    np.testing.assert_array_equal(one.replay.routing, ROUTING)


def test_routing_that_a_dense_trainer_does_not_replay_is_left_out():
    dense = replace(FACTS, moe_layers=0)
    samples = decode_group(scored_group(), [replay(), replay_of("h-3/0/1")], dense)
    assert [sample.replay.routing for sample in samples] == [None, None]


@pytest.mark.parametrize("code", GROUP_FAULTS)
def test_a_fault_of_the_group_has_its_code(code):
    scored = scored_group()
    GROUP_FAULTS[code](scored)
    with pytest.raises(InvalidData) as refusal:
        decode(scored, replay())
    assert refusal.value.code == code


@pytest.mark.parametrize("code", REPLAY_FAULTS)
def test_a_fault_of_the_replay_data_has_its_code(code):
    with pytest.raises(InvalidData) as refusal:
        decode(scored_group(), REPLAY_FAULTS[code])
    assert refusal.value.code == code


def test_the_page_lists_every_code():
    """Those of a group by itself; others are of its comparison with what was issued, or of the blob store."""
    section = PAGE.read_text(encoding="utf-8").partition("## What is checked of a group")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    listed = [code for row in rows if "trainer" in row[3] for code in re.findall(r"`(\w+)`", row[1])]
    assert len(set(listed)) == len(listed)
    compared = {"prompt_mismatch", "sampling_mismatch", "version_unknown", "version_abandoned", "group_too_stale"}
    elsewhere = compared | {"reward_out_of_range", "blob_foreign", "blob_missing"}
    assert set(listed) == GROUP_FAULTS.keys() | REPLAY_FAULTS.keys() | elsewhere
