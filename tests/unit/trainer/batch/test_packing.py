from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidData
from services.common.wire.replay_data import Replay
from services.trainer.batch.packing import MicroBatch, pack, plan_microbatches
from tests.support.trainer.model_families import make_samples

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, world_size=st.integers(1, 5), limit=st.sampled_from([None, 1, 3]))
def test_every_plan_keeps_its_promises(lengths: list[int], world_size: int, limit: int | None) -> None:
    plan = plan_microbatches(lengths, 100, world_size, max_sequences=limit)
    assert plan == plan_microbatches(list(lengths), 100, world_size, max_sequences=limit)
    assert len(plan) == world_size
    assert len({len(batches) for batches in plan}) == 1
    counted = [index for batches in plan for batch in batches if batch.counts for index in batch.indices]
    assert sorted(counted) == list(range(len(lengths)))
    for batches in plan:
        for batch in batches:
            assert 0 < sum(lengths[index] for index in batch.indices) <= 100
            assert limit is None or len(batch.indices) <= limit


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=40, max_size=80), world_size=st.integers(1, 4))
def test_bins_and_ranks_are_balanced(lengths: list[int], world_size: int) -> None:
    plan = plan_microbatches(lengths, 100, world_size)
    loads = [[sum(lengths[i] for i in batch.indices) if batch.counts else 0 for batch in batches] for batches in plan]
    flat = [load for batches in loads for load in batches]
    assert max(flat) - min(flat) <= max(lengths)
    totals = [sum(batches) for batches in loads]
    assert max(totals) - min(totals) <= max(lengths)
    assert len(flat) <= -(-sum(lengths) // 80) + world_size


def test_a_rank_without_samples_repeats_one_that_does_not_count() -> None:
    assert plan_microbatches([7], 10, 2) == [[MicroBatch((0,))], [MicroBatch((0,), counts=False)]]


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(InvalidData, match="sample 1 takes 11 tokens, expected at most 10") as refused:
        plan_microbatches([3, 11], 10, 1)
    assert refused.value.code == "sample_over_budget"
    with pytest.raises(InvalidData, match="no samples"):
        plan_microbatches([], 10, 1)


def test_layout_of_a_packed_row() -> None:
    first, second = make_samples([(3, 2), (1, 4)], routing=(2, 8, 2), candidates=4)
    batch = pack([first, second])
    assert batch.input_ids.tolist() == [
        [*first.prompt_token_ids, first.token_ids[0], *second.prompt_token_ids, *second.token_ids[:-1]]
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.predicting.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.targets.tolist() == [*first.token_ids, *second.token_ids]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1, 1, 1]
    assert (batch.tokens, batch.positions) == (6, 8)
    assert batch.temperatures.tolist() == pytest.approx([0.7] * 6)
    np.testing.assert_array_equal(batch.rollout_logprobs, np.append(first.rollout_logprobs, second.rollout_logprobs))
    assert batch.routing is not None
    np.testing.assert_array_equal(batch.routing, np.concatenate([first.replay.routing, second.replay.routing]))
    assert batch.candidates is not None
    assert batch.candidates.counts.sum() == len(batch.candidates.token_ids)
    moved = batch.to("meta")
    assert moved.routing is not None
    assert moved.candidates is not None
    assert {moved.input_ids.device.type, moved.routing.device.type, moved.candidates.counts.device.type} == {"meta"}


def test_samples_without_candidates_get_empty_rows_among_others() -> None:
    first, second = make_samples([(2, 2), (2, 3)], candidates=4)
    open_set = replace(first, replay=Replay())
    batch = pack([open_set, second])
    assert batch.candidates is not None
    assert batch.candidates.counts[:2].tolist() == [0, 0]
    assert bool((batch.candidates.counts[2:] > 0).all())
    assert pack([open_set]).candidates is None
    assert batch.without_candidates().candidates is None


def test_packing_keeps_no_reference_to_the_sample_arrays() -> None:
    (sample,) = make_samples([(2, 3)], routing=(1, 4, 2))
    batch = pack([sample])
    batch.targets.zero_()
    assert int(torch.as_tensor(sample.token_ids).abs().sum()) > 0
