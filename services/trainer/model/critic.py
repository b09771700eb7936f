"""A critic of its own: a second trunk that only the value loss trains."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from services.common.errors import InvalidData
from services.trainer.batch.packing import PackedBatch
from services.trainer.model.load import Attention, logit_rule, read_model
from services.trainer.model.probe import probe
from services.trainer.model.ragged import sum_dtype
from services.trainer.model.sharding import Sharding, whole_shape


class ValueHead(nn.Module):
    """A linear map of the hidden state to one number, 0 before the first step.

    Computes in float32, or float64 for float64 input, whatever the parameters are stored in: DeepSpeed keeps those of a
    bf16 engine in bf16, with a float32 copy for the optimizer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens"]:
        dtype = sum_dtype(hidden)
        return linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(1)


class Critic(nn.Module):
    """A base model with a value head in place of the output matrix.

    An MoE routes live here: what was captured is the routing of the policy.
    """

    def __init__(self, model: Any, sharding: Sharding | None = None) -> None:
        """`model` is a causal LM, whose output matrix is not kept; sharded by `sharding`."""
        super().__init__()
        embeddings = model.get_input_embeddings().weight
        self.packs = probe(model, [], logit_rule(model.config), sharding).packs
        self.vocabulary = whole_shape(embeddings)[0]
        self.model_type = str(model.config.model_type)
        self.trunk = model.base_model
        self.value_head = ValueHead(whole_shape(model.get_output_embeddings().weight)[1]).to(embeddings.device)

    def forward(self, batch: PackedBatch) -> Float[Tensor, "tokens"]:
        """Before each completion token is chosen."""
        output = self.trunk(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=None, use_cache=False
        )
        values: Tensor = self.value_head(output.last_hidden_state[0, batch.predicting])
        return values


def load_critic(
    path: str,
    *,
    dtype: Literal["float32", "bfloat16"],
    gradient_checkpointing: bool,
    vocabulary: int,
    packs: bool,
    attention: Attention = "auto",
    device: torch.device | None = None,
    sharding: Sharding | None = None,
) -> Critic:
    """From a Hugging Face directory or hub id; the value head starts at zero.

    Raises InvalidData for one that does not take the policy's tokens or packed samples.
    """
    model = read_model(
        path,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        attention=attention,
        device=device,
        sharding=sharding,
    )
    critic = Critic(model, sharding)
    if critic.vocabulary < vocabulary:
        raise InvalidData(
            "critic_mismatch",
            f"algorithm.critic_path {path} has a vocabulary of {critic.vocabulary}, expected at least the policy's "
            f"{vocabulary}: it reads the policy's tokens",
        )
    if packs and not critic.packs:
        raise InvalidData(
            "critic_mismatch",
            f"algorithm.critic_path {path} ({critic.model_type}) mixes packed samples, expected a critic that keeps "
            "them apart as the policy does",
        )
    return critic
