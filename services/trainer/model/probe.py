"""One small forward pass at load that checks the trainer's assumptions against the model itself."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.common.errors import InvalidData
from services.trainer.model.gathering import gathered_by_layer
from services.trainer.model.logprobs import LogitRule
from services.trainer.model.routing_replay import Output, Router, check_rule
from services.trainer.model.sharding import Sharding, whole, whole_shape

FIRST, SECOND = 4, 3
# Of the largest logit; the model multiplies in its own type.
LOGIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Probe:
    moe_layers: int
    experts: int
    experts_per_token: int
    packs: bool


def probe(model: Any, routers: Sequence[Router], rule: LogitRule, sharding: Sharding | None = None) -> Probe:
    """Packs two short sequences and looks at everything on the way.

    Raises InvalidData when a router's rule does not give the router's weights, a router stays unused, or the logits are
    not the rule of hidden state and output matrix.
    """
    with gathered_by_layer(model, sharding):
        seen = _watch(model, routers)
        leaked, own = _influence(seen)
    for router in routers:
        if len(seen.routed.get(router.name, [])) != 1:
            calls = len(seen.routed.get(router.name, []))
            raise InvalidData("router_unsupported", f"{router.name} routed {calls} times in one forward, expected once")
        check_rule(router, seen.routed[router.name][0])
    _check_logits(model, seen, rule, sharding)
    packs = leaked == 0 and own > 0
    if not routers:
        return Probe(0, 0, 0, packs)
    outputs = [(router.rule, seen.routed[router.name][0]) for router in routers]
    experts = {output_rule.logits(output).shape[-1] for output_rule, output in outputs}
    chosen = {output_rule.indices(output).shape[-1] for output_rule, output in outputs}
    if len(experts) > 1 or len(chosen) > 1:
        raise InvalidData(
            "router_unsupported",
            f"MoE layers differ: {sorted(experts)} experts, {sorted(chosen)} a token; expected one of each",
        )
    return Probe(len(routers), experts.pop(), chosen.pop(), packs)


@dataclass
class _Seen:
    embeddings: Tensor
    hidden: Tensor
    logits: Tensor
    routed: dict[str, list[Output]]


def _watch(model: Any, routers: Sequence[Router]) -> _Seen:
    embedding = model.get_input_embeddings()
    vocabulary = whole_shape(embedding.weight)[0]
    ids = (torch.arange(FIRST + SECOND, device=embedding.weight.device) * 7 + 1) % vocabulary
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)]).to(ids.device)
    found: dict[str, Tensor] = {}
    routed: dict[str, list[Output]] = {}

    def embed(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        found["embeddings"] = output.detach().requires_grad_()
        return found["embeddings"]

    def base(_module: nn.Module, _arguments: Any, output: Any) -> None:
        found["hidden"] = output.last_hidden_state

    def route(name: str) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Output) -> None:
            routed.setdefault(name, []).append(tuple(part.detach() for part in output))

        return hook

    training = model.training
    model.eval()
    with ExitStack() as hooks, torch.enable_grad():
        hooks.callback(model.train, training)
        for module, hook in [
            (embedding, embed),
            (model.base_model, base),
            *((router.module, route(router.name)) for router in routers),
        ]:
            hooks.callback(module.register_forward_hook(hook).remove)
        output = model(input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False)
    return _Seen(found["embeddings"], found["hidden"], output.logits, routed)


def _check_logits(model: Any, seen: _Seen, rule: LogitRule, sharding: Sharding | None) -> None:
    output = model.get_output_embeddings()
    wide = torch.promote_types(seen.hidden.dtype, torch.float32)
    with torch.no_grad(), whole(output.parameters(), sharding):
        raw = seen.hidden.to(wide) @ output.weight.to(wide).t()
        bias = getattr(output, "bias", None)
        ours = rule.apply(raw if bias is None else raw + bias.to(wide))
        worst, largest = float((ours - seen.logits).abs().max()), float(seen.logits.abs().max())
    if not worst <= LOGIT_TOLERANCE[seen.hidden.dtype] * max(largest, 1e-6):
        raise InvalidData(
            "logits_unsupported",
            f"logits of {model.config.model_type} are off by up to {worst:.3g} from output matrix and hidden state "
            f"under {rule}, expected none",
        )


def _influence(seen: _Seen) -> tuple[float, float]:
    """How much the first sequence, and the second itself, moves the second's hidden states: largest |gradient|.

    Where packing is exact the first number is exactly zero, in any precision.
    """
    second = seen.hidden[0, FIRST:].float()
    (gradient,) = torch.autograd.grad(
        (second * torch.linspace(-1, 1, second.shape[-1], device=second.device)).sum(), seen.embeddings
    )
    influence = gradient[0].abs().amax(dim=-1)
    return float(influence[:FIRST].max()), float(influence[FIRST:].max())
