"""How much likelier the current policy makes what was sampled, against the old one: in log space, always finite."""

from jaxtyping import Float, Int
from torch import Tensor

from services.trainer.objective.segments import segment_mean


def token_log_ratio(logprobs: Float[Tensor, "N"], old_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """log r = lp − old, token by token (PPO, arXiv 1707.06347, section 3)."""
    return logprobs - old_logprobs


def sequence_log_ratio(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    sequence_ids: Int[Tensor, "N"],
    sequences: int,
) -> Float[Tensor, "N"]:
    """log r = mean of lp − old over the sequence, the same for each of its tokens.

    GSPO, arXiv 2507.18071, equation 7. Gradient reaches every token through the mean, so a token whose own term is
    weighted zero still learns from its neighbours'.
    """
    return segment_mean(logprobs - old_logprobs, sequence_ids, sequences)[sequence_ids]
