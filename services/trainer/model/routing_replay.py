"""Keep routing: the trainer's experts are the sampler's, while the gates stay the trainer's own.

A forward hook on each router of the model recomputes the family's gate weights at the captured experts, so gradient
reaches the router and only the choice is replayed (DeepSeek-V3.2 report, section 3.1). The routing is looked up by
layer, never by the order of calls: gradient checkpointing runs the routers again during backward.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from services.common.errors import InvalidData

Output = tuple[Tensor, ...]


@dataclass(frozen=True)
class RouterRule:
    """`scores` of the chosen experts, then divided by their sum (+ eps), then scaled by an attribute of the router."""

    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"]
    # None: as the router's norm_topk_prob says.
    normalize: bool | None = False
    eps: float = 0.0
    scale: str | None = None
    # Scores are taken in float32, or in the logits' own type.
    float32: bool = True
    logits_at: int = 0
    indices_at: int = 2

    def logits(self, output: Output) -> Float[Tensor, "positions experts"]:
        return output[self.logits_at]

    def indices(self, output: Output) -> Int[Tensor, "positions experts_per_token"]:
        return output[self.indices_at]

    def weights(
        self, module: nn.Module, output: Output, indices: Tensor
    ) -> Float[Tensor, "positions experts_per_token"]:
        logits = self.logits(output)
        if self.float32:
            logits = logits.float()
        if self.scores == "softmax":
            weights = logits.softmax(-1).gather(1, indices)
        elif self.scores == "softmax_of_chosen":
            weights = logits.gather(1, indices).softmax(-1)
        else:
            weights = logits.sigmoid().gather(1, indices)
        if module.norm_topk_prob if self.normalize is None else self.normalize:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + self.eps if self.eps else total)
        if self.scale is not None:
            weights = weights * getattr(module, self.scale)
        return weights.to(output[1].dtype)

    def replace(self, module: nn.Module, output: Output, indices: Tensor) -> Output:
        replaced = list(output)
        replaced[1] = self.weights(module, output, indices)
        replaced[self.indices_at] = indices
        return tuple(replaced)


@dataclass(frozen=True)
class Router:
    name: str
    module: nn.Module
    rule: RouterRule


_SOFTMAX = RouterRule("softmax", normalize=None)
_SOFTMAX_NORMALIZED = RouterRule("softmax", normalize=True)
_CHOSEN = RouterRule("softmax_of_chosen")
_CHOSEN_LAST = RouterRule("softmax_of_chosen", logits_at=2, indices_at=0)
_SIGMOID = RouterRule("sigmoid", normalize=None, eps=1e-20, scale="routed_scaling_factor")
_SIGMOID_NORMALIZED = RouterRule("sigmoid", normalize=True)

# By class name, as in transformers 5.x.
RULES: dict[str, RouterRule] = {
    "FlexOlmoTopKRouter": _SOFTMAX,
    "MellumTopKRouter": _SOFTMAX,
    "OlmoeTopKRouter": _SOFTMAX,
    "Qwen2MoeTopKRouter": _SOFTMAX,
    "Qwen3MoeTopKRouter": _SOFTMAX,
    "Qwen3NextTopKRouter": _SOFTMAX,
    "Qwen3_5MoeTopKRouter": _SOFTMAX_NORMALIZED,
    "Qwen3VLMoeTextTopKRouter": _SOFTMAX_NORMALIZED,
    "MixtralTopKRouter": _SOFTMAX_NORMALIZED,
    "MiniMaxTopKRouter": _SOFTMAX_NORMALIZED,
    "HunYuanMoEV1Gate": _SOFTMAX_NORMALIZED,
    "DeepseekV2TopkRouter": RouterRule("softmax", scale="routed_scaling_factor"),
    "GptOssTopKRouter": RouterRule("softmax_of_chosen", float32=False),
    "GraniteMoeTopKRouter": _CHOSEN_LAST,
    "GraniteMoeHybridTopKRouter": _CHOSEN_LAST,
    "GraniteMoeSharedTopKRouter": _CHOSEN_LAST,
    "GraniteMoeSWATopKRouter": _CHOSEN,
    "DeepseekV3TopkRouter": _SIGMOID,
    "DeepseekV32TopkRouter": _SIGMOID,
    "Dots1TopkRouter": _SIGMOID,
    "ExaoneMoeTopkRouter": _SIGMOID,
    "Glm4MoeTopkRouter": _SIGMOID,
    "Glm4MoeLiteTopkRouter": _SIGMOID,
    "GlmMoeDsaTopkRouter": _SIGMOID,
    "SolarOpenTopkRouter": _SIGMOID,
    "MiniMaxM2TopKRouter": _SIGMOID_NORMALIZED,
    "Lfm2MoeTopKRouter": RouterRule("sigmoid", normalize=None, eps=1e-6, scale="routed_scaling_factor", float32=False),
}

REFUSED_TYPES = {
    "phimoe": "its sparse mixer weighs an expert by a masked softmax that depends on the native choice",
    "llama4": "its router returns dense scores and no indices",
    "jetmoe": "its gating returns tokens sorted by expert, and its attention is routed too",
    "dbrx": "it chooses experts outside the router",
}

_ROUTER_NAME = re.compile(r"(Router|TopKGating|MoEGate|MoEV1Gate)$")


def find_routers(model: nn.Module) -> list[Router]:
    """The routers in layer order; none for a dense model. Raises InvalidData for a family that cannot be replayed."""
    model_type = getattr(getattr(model, "config", None), "model_type", "unknown")
    if model_type in REFUSED_TYPES:
        raise InvalidData(
            "router_unsupported", f"routing of {model_type} cannot be replayed: {REFUSED_TYPES[model_type]}"
        )
    return list(_routers(model, model_type))


def _routers(model: nn.Module, model_type: str) -> Iterator[Router]:
    for name, module in model.named_modules():
        family = type(module).__name__
        if not _ROUTER_NAME.search(family):
            continue
        rule = RULES.get(family)
        if rule is None:
            raise InvalidData(
                "router_unsupported", f"{name} of {model_type} is a {family}, for which there is no routing rule"
            )
        if getattr(module, "topk_method", "greedy") == "group_limited_greedy":
            raise InvalidData(
                "router_unsupported",
                f"{name} of {model_type} has topk_method group_limited_greedy, which cannot be replayed",
            )
        yield Router(name, module, rule)


def check_rule(router: Router, output: Output) -> None:
    """Raises InvalidData unless the rule at the native indices gives the native weights."""
    weights = router.rule.weights(router.module, output, router.rule.indices(output))
    if not torch.equal(weights, output[1]):
        worst = float((weights - output[1]).abs().max())
        raise InvalidData(
            "router_rule", f"the rule of {router.name} is off by up to {worst:.3g} from its own weights, expected none"
        )


@dataclass(frozen=True)
class RoutingAgreement:
    """In how many of `rows` positions each MoE layer's live choice equals the sampler's, as a set."""

    rows: int
    agreeing: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """1.0 where nothing was compared."""
        return sum(self.agreeing) / (self.rows * len(self.agreeing)) if self.rows and self.agreeing else 1.0


@dataclass
class _Open:
    routing: Int[Tensor, "positions layers experts_per_token"]
    override: bool
    agreeing: dict[int, Tensor] = field(default_factory=dict)


class RoutingReplay:
    """Hooks every router once; without an open replay they route natively.

    A replay must stay open until the backward of its forward has ended.
    """

    def __init__(self, routers: Sequence[Router], *, experts: int, experts_per_token: int) -> None:
        self._shape = (len(routers), experts_per_token)
        self._experts = experts
        self._open: _Open | None = None
        for layer, router in enumerate(routers):
            router.module.register_forward_hook(self._hook(layer, router))

    @property
    def layers(self) -> int:
        return self._shape[0]

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def open(self, routing: Int[Tensor, "positions layers experts_per_token"], *, override: bool) -> None:
        """`override` False only measures agreement. Raises InvalidData for routing that cannot be this model's."""
        if self._open is not None:
            raise RuntimeError("a routing replay is already open: the backward of the last forward has not ended")
        if routing.ndim != 3 or tuple(routing.shape[1:]) != self._shape:
            raise InvalidData(
                "routing_shape",
                f"routing is {list(routing.shape)}, expected [positions, L, K] with [L, K] = {list(self._shape)}",
            )
        low, high = (int(bound) for bound in torch.aminmax(routing))
        if low < 0 or high >= self._experts:
            raise InvalidData(
                "expert_out_of_range", f"routing names experts {low} to {high}, expected 0 to {self._experts - 1}"
            )
        ordered = routing.sort(dim=2).values
        if bool((ordered[:, :, 1:] == ordered[:, :, :-1]).any()):
            raise InvalidData("routing_duplicate", "routing names one expert twice for a token")
        self._open = _Open(routing, override)

    def close(self) -> None:
        self._open = None

    @contextmanager
    def replaying(
        self, routing: Int[Tensor, "positions layers experts_per_token"], *, override: bool
    ) -> Iterator[None]:
        self.open(routing, override=override)
        try:
            yield
        finally:
            self.close()

    def agreement(self) -> RoutingAgreement:
        """Of the open replay. Raises InvalidData when a layer has not routed yet."""
        if self._open is None:
            raise RuntimeError("no routing replay is open")
        agreeing = self._open.agreeing
        if missing := [layer for layer in range(self.layers) if layer not in agreeing]:
            raise InvalidData(
                "routing_unused", f"MoE layers {missing} did not route in this forward, so nothing was replayed"
            )
        counts = torch.stack([agreeing[layer] for layer in range(self.layers)]).tolist()
        return RoutingAgreement(self._open.routing.shape[0], tuple(counts))

    def _hook(self, layer: int, router: Router) -> Any:
        def hook(_module: nn.Module, _arguments: tuple[Any, ...], output: tuple[Tensor, ...]) -> Any:
            replay = self._open
            if replay is None:
                return None
            native = router.rule.indices(output)
            chosen = replay.routing[:, layer]
            if native.shape != chosen.shape:
                raise InvalidData(
                    "routing_rows",
                    f"routing has {chosen.shape[0]} rows, layer {layer} routes {native.shape[0]} positions",
                )
            if layer not in replay.agreeing:
                same = (native.sort(dim=1).values == chosen.sort(dim=1).values).all(dim=1)
                replay.agreeing[layer] = same.sum()
            return router.rule.replace(router.module, output, chosen.to(native.dtype)) if replay.override else None

        return hook
