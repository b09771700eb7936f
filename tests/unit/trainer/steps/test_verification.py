"""What comes back is compared with what was issued. Each fault was trained on before."""

import pytest
from trivet.v1 import sample_pb2

from services.common import metrics as common
from services.common.config import BlobConfig
from services.common.transport.weight_feed import WeightFeed
from tests.support.trainer.orchestration import (
    GROUPS,
    SIZE,
    dead_letters,
    evaluated,
    orchestrator,
    state,
    trained,
    until_training,
)


def stream_as_blob(scored):
    scored.group.samples[0].replay.key = "run:prompts"


def blob_of_another(scored):
    scored.group.samples[0].replay.CopyFrom(scored.group.samples[1].replay)


def equal_ids(scored):
    scored.group.samples[1].sample_id = scored.group.samples[0].sample_id


def ids_of_another_group(scored):
    for sample in scored.group.samples:
        sample.sample_id = f"other/0/{sample.index}"


def too_long(scored):
    sample = scored.group.samples[0]
    length = scored.group.prompt.sampling.max_tokens + 500
    sample.token_ids[:], sample.logprobs[:] = [1] * length, [-1.0] * length
    sample.versions[0].end = length


def likely(scored):
    scored.group.samples[1].logprobs[1] = 30.0


def absurd(scored):
    scored.group.samples[1].logprobs[1] = -1e30


def high_reward(scored):
    scored.scores[1].reward = scored.scores[1].raw_reward = 7.0


def low_raw_reward(scored):
    scored.scores[0].raw_reward = -0.5


def unfinished(scored):
    scored.group.samples[0].finish_reason = sample_pb2.FINISH_REASON_UNSPECIFIED


def no_versions(scored):
    del scored.group.samples[0].versions[:]


def gap_in_versions(scored):
    scored.group.samples[0].versions[0].end = 1


def overlapping_versions(scored):
    scored.group.samples[0].versions.add(version=0, start=1, end=2)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (stream_as_blob, "blob_foreign"),
        (blob_of_another, "blob_foreign"),
        (equal_ids, "sample_id"),
        (ids_of_another_group, "sample_id"),
        (too_long, "completion_length"),
        (likely, "logprob_out_of_range"),
        (absurd, "logprob_out_of_range"),
        (high_reward, "reward_out_of_range"),
        (low_raw_reward, "reward_out_of_range"),
        (unfinished, "finish_reason"),
        (no_versions, "version_spans"),
        (gap_in_versions, "version_spans"),
        (overlapping_versions, "version_spans"),
    ],
)
def test_a_group_that_breaks_its_contract_is_dead_lettered(config, redis_client, play, change, code):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer(lambda scored: change(scored) if scored.group.prompt.request == 0 else None)
    assert trained(until_training(made)) == [1, 2]
    assert [(letter.code, letter.group_id) for letter in dead_letters(redis_client)] == [(code, f"{made.history}-0")]
    made.intake.commit()
    assert redis_client.exists("run:prompts")


def another_size(scored):
    del scored.group.samples[1], scored.scores[1]
    scored.group.prompt.group_size = 1


def no_size(scored):
    del scored.group.samples[:], scored.scores[:]
    scored.group.prompt.group_size = 0


def other_tokens(scored):
    scored.group.prompt.token_ids[0] += 1


def other_text(scored):
    scored.group.prompt.text = "another question"


def other_metadata(scored):
    scored.group.prompt.metadata_json = '{"answer": "2"}'


def other_issue(scored):
    scored.group.prompt.request = 2


def other_purpose(scored):
    scored.group.prompt.purpose = sample_pb2.PURPOSE_EVALUATION


def other_temperature(scored):
    scored.group.prompt.sampling.temperature = 0.5


def other_top_p(scored):
    scored.group.prompt.sampling.top_p = 0.9


def other_limit(scored):
    scored.group.prompt.sampling.max_tokens += 500


def seeded(scored):
    scored.group.prompt.sampling.seed = 0


def future_version(scored):
    scored.group.samples[0].versions[0].version = 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (another_size, "sampling_mismatch"),
        (no_size, "sampling_mismatch"),
        (other_temperature, "sampling_mismatch"),
        (other_top_p, "sampling_mismatch"),
        (other_limit, "sampling_mismatch"),
        (seeded, "sampling_mismatch"),
        (other_tokens, "prompt_mismatch"),
        (other_text, "prompt_mismatch"),
        (other_metadata, "prompt_mismatch"),
        (other_issue, "prompt_mismatch"),
        (other_purpose, "prompt_mismatch"),
        (future_version, "version_unknown"),
    ],
)
def test_what_was_not_issued_so_is_sampled_again_and_given_up_in_the_end(
    config,
    redis_client,
    play,
    change,
    code,
):
    made = orchestrator(config, redis_client)
    made.issue()
    reissued = []
    play.answer(lambda scored: change(scored) if scored.group.prompt.request == 0 else None)
    assert trained(until_training(made)) == [1, 2]
    for attempt in (1, 2, 3):
        (again,) = play.read()
        reissued.append((again.message.request, again.message.attempt))
        scored = play.group(again.message)
        change(scored)
        play.prompts.forward(again.id, play.scored, scored)
        made.intake.poll(0.2)
        assert (0 in made.ledger.outstanding) == (attempt < 3)
    assert reissued == [(0, 1), (0, 2), (0, 3)]
    assert [(letter.code, letter.group_id) for letter in dead_letters(redis_client)] == [(code, f"{made.history}-0")]


def test_what_is_sampled_again_leaves_no_blobs_once_it_is_over(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer(lambda scored: other_tokens(scored) if scored.group.prompt.request == 0 else None)
    assert trained(until_training(made)) == [1, 2]
    play.answer()
    assert trained(until_training(made)) == [3, 0]
    assert len(redis_client.keys(f"run:blob:{made.history}-0/*")) == 2 * SIZE
    made.intake.commit()
    assert redis_client.keys(f"run:blob:{made.history}-0/*") == []


def test_a_finished_run_leaves_no_blobs_of_groups_it_never_issued(config, redis_client, play):
    """As of steps after the checkpoint that it resumed from."""
    made = orchestrator(config, redis_client)
    redis_client.set(f"run:blob:{made.history}-1000/0/0", b"replay data")
    made.commit()
    assert redis_client.keys("run:blob:*") != []
    made.step = config.trainer.steps
    made.commit()
    assert redis_client.keys("run:blob:*") == []


def test_settings_that_changed_between_two_starts_are_good_for_what_was_issued_before(
    config,
    redis_client,
    play,
):
    made = orchestrator(config, redis_client)
    made.issue()
    saved = state(made)
    saved.ledger.update(made.dump())
    sampling = config.sampling.model_copy(update={"temperature": 0.7, "max_tokens": 5, "group_size": 3})
    again = orchestrator(config.model_copy(update={"sampling": sampling}), redis_client)
    again.restore(saved)
    play.answer()
    order = until_training(again)
    assert {scored.group.prompt.sampling.temperature for scored in order.groups} == {1.0}
    again.step += 1
    again.issue()
    assert len(play.answer()) == GROUPS
    assert trained(until_training(again)) == [2, 3]
    again.step += 1
    order = until_training(again)
    assert {round(scored.group.prompt.sampling.temperature, 3) for scored in order.groups} == {0.7}
    assert dead_letters(redis_client) == []
    assert len(again.dump()["sampling"]) == 2


@pytest.mark.parametrize("saved", [True, False])
def test_versions_of_before_a_start_are_known(config, redis_client, play, saved):
    """Also without a checkpoint: rollouts sample on until they have loaded the new version 0."""
    from trivet.v1 import weights_pb2

    made = orchestrator(config, redis_client)
    made.issue()
    for version in (0, 1, 0):
        WeightFeed(redis_client, "run").announce(weights_pb2.WeightVersion(version=version, fingerprint=f"f{version}"))
    again = orchestrator(config, redis_client)
    if saved:
        again.restore(state(made))
    else:
        again.issue()
    play.answer(future_version)
    assert trained(until_training(again)) == [0, 1]


def test_a_file_outside_the_stores_root_survives(config, redis_client, play, tmp_path):
    from services.common.transport.blobs import open_blobs

    on_disk = config.model_copy(update={"blobs": BlobConfig(url=f"file://{tmp_path}/blobs")})
    play.blobs = open_blobs(on_disk.blobs, redis_client, "run")
    outside = tmp_path / "outside"
    outside.write_bytes(b"replay")
    before = common.BLOB_FAILURES.labels("blob_foreign")._value.get()

    def elsewhere(scored):
        for sample in scored.group.samples:
            sample.replay.key = str(outside)

    # One of a history that nobody knows is dropped with its blobs, one that is known is refused.
    earlier = orchestrator(on_disk, redis_client)
    earlier.issue()
    play.answer(elsewhere)
    made = orchestrator(on_disk, redis_client)
    made.issue()
    play.answer(lambda scored: elsewhere(scored) if scored.group.prompt.request == 0 else None)
    assert trained(until_training(made)) == [1, 2]
    made.intake.commit()
    assert outside.read_bytes() == b"replay"
    assert common.BLOB_FAILURES.labels("blob_foreign")._value.get() > before


@pytest.mark.parametrize(
    ("change", "code"),
    [(other_tokens, "prompt_mismatch"), (high_reward, "reward_out_of_range"), (other_temperature, "sampling_mismatch")],
)
def test_an_evaluation_counts_only_what_was_issued(config, redis_client, play, change, code):
    made = orchestrator(config, redis_client)

    def change_one(scored):
        if scored.group.prompt.group_id.endswith("sampled-1"):
            change(scored)

    values = evaluated(made, lambda: play.answer(change_one))
    assert values["failures"] == 1.0
    assert {letter.code for letter in dead_letters(redis_client)} == {code}
