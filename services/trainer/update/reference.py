"""The frozen reference of the KL term and of DPO."""

from dataclasses import fields

import torch
from jaxtyping import Float
from torch import Tensor

from services.common.config import Config, ModelConfig, ReferenceConfig
from services.common.errors import InvalidData
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch
from services.trainer.engine.protocol import UpdateEngine
from services.trainer.model.load import FLASH
from services.trainer.model.policy import Policy, load_policy
from services.trainer.model.quantization import quantize
from services.trainer.model.sharding import Sharding
from services.trainer.update.algorithm import needs_reference


class Reference:
    """Log-probs under weights that never change, on a device of its own.

    It sees what the policy sees: the sampler's routing and the sampler's candidate sets, at the sampler's temperature,
    so that the KL term compares two distributions over the same set.
    """

    def __init__(self, policy: Policy, device: torch.device, sharding: Sharding | None = None) -> None:
        """`sharding` is what has sharded `policy`: then all ranks must call `logprobs`."""
        self.facts: ModelFacts = policy.facts
        policy.eval().requires_grad_(False)
        self._policy = policy.to(device) if sharding is None else sharding.inference(policy)
        self._device = device

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> Float[Tensor, "tokens"]:
        """On the batch's device."""
        with torch.no_grad():
            logprobs, _ = self._policy(batch.to(self._device), keep_routing=keep_routing)
        result: Tensor = logprobs.to(batch.targets.device)
        return result


def load_reference(
    config: ReferenceConfig,
    model: ModelConfig,
    *,
    device: torch.device,
    keep_routing: bool = True,
    sharding: Sharding | None = None,
) -> Reference:
    """`device` is the trainer's; under int8 the rest has model.dtype. Raises InvalidData as load_policy does.

    `sharding` shards a reference that is neither int8 nor on the CPU next to a trainer that is not: those are whole on
    each rank.
    A reference on the CPU or in float32 leaves a flash kernel of model.attention to the policy.
    """
    dtype = config.dtype or model.dtype
    wide = model.dtype if dtype == "int8" else dtype
    own = torch.device("cpu") if config.device == "cpu" else device
    shards = None if dtype == "int8" or own.type != device.type else sharding
    fits = model.attention not in FLASH or (own.type == "cuda" and wide != "float32")
    policy = load_policy(
        config.path or model.path,
        dtype=wide,
        keep_routing=keep_routing,
        attention=model.attention if fits else "auto",
        device=own,
        sharding=shards,
    )
    if dtype == "int8":
        quantize(policy.model)
    return Reference(policy, own, shards)


def check_reference(reference: ModelFacts, policy: ModelFacts, *, keep_routing: bool) -> None:
    """Raises InvalidData where the policy's batches do not fit the reference: another vocabulary, other experts."""
    exempt = {"model_type"} if keep_routing else {"model_type", "moe_layers", "experts", "experts_per_token"}
    for field in fields(ModelFacts):
        theirs, ours = getattr(reference, field.name), getattr(policy, field.name)
        # A reference that packs takes a policy's samples one by one, too.
        if field.name in exempt or theirs == ours or (field.name == "packs" and theirs):
            continue
        raise InvalidData(
            "reference_mismatch", f"reference.path has {field.name} {theirs}, expected the policy's: {ours}"
        )


def open_reference(config: Config, engine: UpdateEngine) -> Reference | None:
    """None where the configuration needs none. Raises InvalidData as load_reference and check_reference do."""
    if not needs_reference(config):
        return None
    keep_routing = config.rl_stability.consistency.keep_routing
    reference = load_reference(
        config.reference,
        config.model,
        device=engine.device,
        keep_routing=keep_routing,
        sharding=engine.sharding,
    )
    check_reference(reference.facts, engine.facts, keep_routing=keep_routing)
    return reference
