"""From one number a token to one loss a step."""

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.objective.types import Aggregation, LossInputs


def token_weights(inputs: LossInputs, aggregation: Aggregation) -> Float[Tensor, "N"]:
    """The share of each token in the step's loss: Σ weight·value over all micro-batches and ranks is

    token_mean      Σ value / tokens                    (DAPO, arXiv 2503.14476, section 3.3)
    sequence_mean   Σ mean over the sequence / sequences  (GRPO, arXiv 2402.03300, equation 3)
    fixed_length    Σ value / (sequences · max_length)  (Dr. GRPO, arXiv 2503.20783, section 3.2)
    """
    match aggregation:
        case "token_mean":
            return torch.full_like(inputs.rollout_logprobs, 1 / inputs.total_tokens)
        case "sequence_mean":
            lengths = inputs.lengths[inputs.sequence_ids].to(inputs.rollout_logprobs.dtype)
            return 1 / (lengths * inputs.total_sequences)
        case "fixed_length":
            return torch.full_like(inputs.rollout_logprobs, 1 / (inputs.total_sequences * inputs.max_length))
