"""A step's order into its training samples: the same on every rank, and again when the step is run again."""

from trivet.v1 import step_pb2

from services.common.config import Config
from services.trainer.groups import given_answers, training_samples
from services.trainer.policy import ModelFacts
from services.trainer.rewards import advantages_in_groups, shaped_rewards
from services.trainer.samples import TrainSample


def batch_samples(order: step_pb2.StepOrder, config: Config, facts: ModelFacts) -> list[TrainSample]:
    """In the order of the groups. Raises InvalidData as training_samples and given_answers do."""
    if config.data.preferences is not None:
        return [sample for scored in order.groups for sample in given_answers(scored, facts)]
    rewards = shaped_rewards(order.groups, config)
    advantages = advantages_in_groups(rewards, config.algorithm.advantage_normalization)
    samples: list[TrainSample] = []
    for scored, reward, advantage in zip(order.groups, rewards, advantages, strict=True):
        samples += training_samples(
            scored,
            order.replay[len(samples) : len(samples) + len(reward)],
            facts,
            rewards=reward,
            advantages=advantage,
        )
    return samples
