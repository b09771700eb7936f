"""A configuration that changed between two starts, while samples of the first were under way."""

from pathlib import Path

import pytest
import torch

from services.common.config import BlobConfig, Config
from services.common.errors import InvalidData
from services.common.transport.blobs import open_blobs
from services.common.wire.replay_data import Replay, encode_replay
from services.trainer.batch.groups import batch_samples, decode_group
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.checkpoint.directory import FIXED
from services.trainer.metrics import counters
from services.trainer.model.policy import load_policy
from services.trainer.update.open import open_updater
from tests.support.trainer.model_families import make_model
from tests.support.trainer.orchestration import GROUPS, SIZE, Play, orchestrator, state, trained, until_training
from tests.support.trainer.plain_engine import DescentEngine, update_configuration
from tests.support.trainer.recorded_run import make_order

BEFORE, NOW = 8, 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    make_model("qwen3", dtype=torch.float32).save_pretrained(directory)
    return str(directory)


def gradients(base, order, max_tokens):
    settings = update_configuration(
        model={"path": base}, sampling={"max_tokens": max_tokens}, algorithm={"aggregation": "fixed_length"}
    )
    engine = DescentEngine(load_policy(base, dtype="float32"))
    open_updater(settings, engine, None).train(batch_samples(order, settings, engine.facts))
    return engine.gradients


def test_what_was_sampled_under_a_longer_limit_is_trained_on_as_it_would_have_been(base):
    order = make_order(1)
    assert max(len(sample.token_ids) for scored in order.groups for sample in scored.group.samples) > NOW
    then, now = gradients(base, order, BEFORE), gradients(base, order, NOW)
    assert all(torch.equal(now[name], gradient) for name, gradient in then.items())


def test_where_limits_are_mixed_the_longest_is_the_steps_constant(base):
    order = make_order(1)
    expected = gradients(base, order, NOW)
    order.groups[0].group.prompt.sampling.max_tokens = NOW + 1
    found = gradients(base, order, NOW)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def drawn(top_k=0, top_p=1.0):
    scored, *_ = make_order(1).groups
    scored.group.prompt.sampling.top_k, scored.group.prompt.sampling.top_p = top_k, top_p
    del scored.group.samples[1:], scored.scores[1:]
    facts = ModelFacts("qwen3", 96, 0, 0, 0, True)
    return decode_group(scored, [encode_replay(scored.group.samples[0].sample_id, Replay())], facts)


def test_candidates_are_expected_of_samples_that_were_truncated_whatever_is_asked_for_now():
    assert len(drawn()) == 1
    for truncated in ({"top_k": 20}, {"top_p": 0.9}):
        with pytest.raises(InvalidData, match="has no candidates, but sampling truncates"):
            drawn(**truncated)


def changed(config, **sections):
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def reissued(code):
    return counters.GROUPS_REISSUED.labels(code)._value.get()


def test_prompts_that_a_rollout_now_refuses_are_issued_again_as_the_configuration_says_now(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    now = changed(config, sampling={"max_tokens": 5}, trainer={"max_lost_groups": 0})
    again = orchestrator(now, redis_client)
    again.restore(state(made))
    before = reissued("prompt_too_long")
    for entry in play.read():
        play.prompts.dead_letter(entry, InvalidData("prompt_too_long", "sampling.max_tokens is 512"))
    again.next_order()
    assert reissued("prompt_too_long") == before + 2 * GROUPS
    assert {prompt.sampling.max_tokens for prompt in play.prompts.scan()} == {5}
    play.answer()
    assert trained(until_training(again)) == [0, 1]
    assert again.ledger.lost == set()


def read_all(play):
    """Claims come before what is new, so that it takes several reads."""
    for _ in range(20):
        yield from play.read()


def test_one_that_is_refused_again_is_lost(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    again = orchestrator(config, redis_client)
    again.restore(state(made))
    for attempt in range(2):
        entry = next(each for each in read_all(play) if (each.message.request, each.message.attempt) == (0, attempt))
        play.prompts.dead_letter(entry, InvalidData("token_out_of_range", "token_ids holds 99"))
        again.next_order()
    assert again.ledger.lost == {0}


def test_rewards_outside_a_range_that_has_changed_are_sampled_and_scored_again(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    again = orchestrator(changed(config, reward={"minimum": 0.5, "maximum": 2.0}), redis_client)
    before = reissued("reward_out_of_range")
    again.restore(state(made))
    again.next_order()
    assert reissued("reward_out_of_range") == before + 2 * GROUPS
    assert again.ledger.lost == set()
    assert redis_client.xlen("run:dead") == 0


def test_another_place_for_blobs_has_sampled_again_what_lies_in_the_old_one(config, redis_client, play, tmp_path):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    now = config.model_copy(update={"blobs": BlobConfig(url=f"file://{tmp_path}/blobs")})
    again = orchestrator(now, redis_client)
    again.restore(state(made))
    again.next_order()
    play.blobs = open_blobs(now.blobs, redis_client, "run")
    play.answer()
    assert trained(until_training(again)) == [0, 1]
    assert again.ledger.lost == set()


def test_another_redis_has_sampled_again_what_was_in_the_old_one(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    first = trained(until_training(made))
    made.step += 1
    saved = state(made, step=1)
    redis_client.flushdb()
    again = orchestrator(config, redis_client)
    again.restore(saved)
    again.issue()
    Play(config, redis_client).answer()
    assert first + trained(until_training(again)) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 3])
def test_groups_of_two_sizes_are_trained_together(config, redis_client, play, size):
    made = orchestrator(config, redis_client)
    made.issue()
    again = orchestrator(changed(config, sampling={"group_size": size}), redis_client)
    again.restore(state(made))
    again.issue()
    play.answer()
    order = until_training(again)
    assert [len(scored.scores) for scored in order.groups] == [SIZE, SIZE]
    again.step += 1
    again.issue()
    play.answer()
    until_training(again)
    again.step += 1
    assert [len(scored.scores) for scored in until_training(again).groups] == [size, size]


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_another_number_of_steps_ends_where_it_says(config, redis_client, play, steps):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    trained(until_training(made))
    again = orchestrator(changed(config, trainer={"steps": steps}), redis_client)
    again.restore(state(made, step=1))
    again.issue()
    assert len(again.ledger.outstanding) == min(2, steps - 1) * GROUPS


def test_every_section_of_the_configuration_has_a_row_in_the_docs():
    page = (Path(__file__).parents[4] / "docs" / "resuming.md").read_text(encoding="utf-8")
    named = {key for line in page.splitlines() if line.startswith("| `") for key in line.split("|")[1].split("`")[1::2]}
    assert {key.partition(".")[0] for key in named if "." in key} == set(Config.model_fields)
    assert named >= set(FIXED)
