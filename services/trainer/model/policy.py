"""The model as the trainer sees it: packed samples in, log-probabilities of their completion tokens out."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from services.common.config import Config
from services.common.errors import InvalidData
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch
from services.trainer.model.critic import Critic, ValueHead, load_critic
from services.trainer.model.load import DTYPES, Attention, logit_rule, read_model
from services.trainer.model.logprobs import LogProbHead, LogProbQuery
from services.trainer.model.probe import Probe, probe
from services.trainer.model.routing_replay import Router, RoutingAgreement, RoutingReplay, find_routers
from services.trainer.model.sharding import Sharding, whole_shape
from services.trainer.objective import find_algorithm


class Policy(nn.Module):
    """Computes over the base model's hidden states; full logits never exist.

    With gradients on, the routing replay stays open after `forward`, because gradient checkpointing routes again: call
    `close_routing` once backward has ended. `agreement` is that of the last forward, None where nothing was compared.
    """

    def __init__(
        self,
        model: Any,
        *,
        keep_routing: bool = True,
        value_head: bool = False,
        critic: Critic | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """Values come from a `value_head` on the policy's trunk or from a `critic` of its own; not from both.

        `sharding` is what has sharded `model`.

        Raises InvalidData for a family whose routing (with `keep_routing`) or logits cannot be computed exactly.
        """
        super().__init__()
        if model.base_model is model or model.get_output_embeddings() is None:
            raise InvalidData(
                "model_unsupported",
                f"{type(model).__name__} has no base model with an output matrix, expected a causal LM",
            )
        routers = _routers(model, keep_routing)
        rule = logit_rule(model.config)
        seen = probe(model, routers, rule, sharding)
        self.model = model
        output = model.get_output_embeddings()
        self.head = LogProbHead(output.weight, getattr(output, "bias", None))
        self.value_head = ValueHead(whole_shape(output.weight)[1]).to(output.weight.device) if value_head else None
        self.critic = critic
        self._rule = rule
        self.facts = _facts(model, output, seen)
        self.agreement: RoutingAgreement | None = None
        self.routing = (
            RoutingReplay(routers, experts=seen.experts, experts_per_token=seen.experts_per_token) if routers else None
        )

    def forward(
        self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False
    ) -> tuple[Float[Tensor, "tokens"], ...]:
        """Log-probs of the completion tokens at the sampler's temperature and candidates, and entropies, in nats.

        With a value head or a critic, third, the value before each token is chosen. Entropies are detached unless
        `entropy_gradient`. `keep_routing` replays the captured experts; else they are only compared. Raises InvalidData
        for data that is not this model's.
        """
        self.agreement = None
        if keep_routing and self.routing is not None and batch.routing is None:
            raise InvalidData(
                "routing_missing", f"samples {list(batch.sample_ids)} have no routing, expected it for an MoE"
            )
        if batch.routing is not None and self.routing is None and keep_routing:
            raise InvalidData(
                "routing_shape",
                f"samples {list(batch.sample_ids)} have routing, expected none for {self.facts.model_type}",
            )
        if len(batch.sample_ids) > 1 and not self.facts.packs:
            raise InvalidData(
                "packing_inexact", f"{self.facts.model_type} mixes packed samples, expected one sample a batch"
            )
        captured = batch.routing is not None and self.routing is not None
        if captured:
            self.routing.open(batch.routing, override=keep_routing)  # type: ignore[union-attr, arg-type]
        finished = False
        try:
            hidden = self._hidden(batch)
            if captured:
                self.agreement = self.routing.agreement()  # type: ignore[union-attr]
            finished = True
        finally:
            if not (finished and torch.is_grad_enabled()):
                self.close_routing()
        query = LogProbQuery(batch.targets, batch.temperatures, batch.candidates, self._rule, entropy_gradient)
        logprobs, entropies = self.head(hidden, query)
        if self.critic is not None:
            return logprobs, entropies, self.critic(batch)
        return (logprobs, entropies) if self.value_head is None else (logprobs, entropies, self.value_head(hidden))

    def close_routing(self) -> None:
        if self.routing is not None:
            self.routing.close()

    def _hidden(self, batch: PackedBatch) -> Float[Tensor, "tokens hidden"]:
        output = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=None, use_cache=False
        )
        hidden: Tensor = output.last_hidden_state[0, batch.predicting]
        return hidden


def configured_policy(config: Config, path: str, device: torch.device, sharding: Sharding | None = None) -> Policy:
    """As the configuration trains it: with the value head or the critic of its algorithm. Raises as load_policy does.

    Raises ValueError for an unknown algorithm: it decides whether there is a value head or a critic.
    """
    has_critic = find_algorithm(config.algorithm.name).value is not None
    separate = has_critic and config.algorithm.critic == "separate"
    return load_policy(
        path,
        dtype=config.model.dtype,
        keep_routing=config.rl_stability.consistency.keep_routing,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        value_head=has_critic and not separate,
        critic_path=config.algorithm.critic_path or config.model.path if separate else None,
        attention=config.model.attention,
        device=device,
        sharding=sharding,
    )


def load_policy(
    path: str,
    *,
    dtype: Literal["float32", "bfloat16"],
    keep_routing: bool = True,
    gradient_checkpointing: bool = False,
    value_head: bool = False,
    critic_path: str | None = None,
    attention: Attention = "auto",
    device: torch.device | None = None,
    sharding: Sharding | None = None,
) -> Policy:
    """From a Hugging Face directory or hub id; in train mode. Raises InvalidData as Policy and read_model do.

    On the CPU, whatever `device` it will compute on, but for a flash kernel. With `sharding` all parameters are sharded
    and all ranks call this alike.

    With `critic_path` values come from a critic read from there. A value head starts at zero, whatever is on disk.
    """
    model = read_model(
        path,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        attention=attention,
        device=device,
        sharding=sharding,
    )
    policy = Policy(model, keep_routing=keep_routing, value_head=value_head, sharding=sharding)
    if critic_path is not None:
        policy.critic = load_critic(
            critic_path,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            vocabulary=policy.facts.vocabulary,
            packs=policy.facts.packs,
            attention=attention,
            device=device,
            sharding=sharding,
        )
    if sharding is not None:
        sharding.shard(policy.parameters(), DTYPES[dtype])
    return policy.train()


def _routers(model: nn.Module, keep_routing: bool) -> list[Router]:
    try:
        return find_routers(model)
    except InvalidData:
        if keep_routing:
            raise
        return []


def _facts(model: Any, output: Any, seen: Probe) -> ModelFacts:
    return ModelFacts(
        model.config.model_type,
        whole_shape(output.weight)[0],
        seen.moe_layers,
        seen.experts,
        seen.experts_per_token,
        seen.packs,
    )
