"""Keep routing: the trainer's experts are the sampler's, while the gates stay the trainer's own.

A forward hook on each router of the model recomputes the family's gate weights at the recorded experts, so gradient
reaches the router and only the choice is replayed (DeepSeek-V3.2 report, section 3.1). The record is looked up by
layer, never by the order of calls: gradient checkpointing runs the routers again during backward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from services.common.errors import InvalidData
from services.trainer.router_rules import Router


@dataclass(frozen=True)
class RoutingAgreement:
    """In how many of `rows` positions each MoE layer's live choice was the recorded one, as a set."""

    rows: int
    agreeing: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """1.0 where nothing was compared."""
        return sum(self.agreeing) / (self.rows * len(self.agreeing)) if self.rows and self.agreeing else 1.0


@dataclass
class _Record:
    routing: Int[Tensor, "positions layers experts_per_token"]
    override: bool
    agreeing: dict[int, Tensor] = field(default_factory=dict)


class RoutingReplay:
    """Hooks every router once; without an open record they route natively.

    A record must stay open until the backward of its forward has ended.
    """

    def __init__(self, routers: Sequence[Router], *, experts: int, experts_per_token: int) -> None:
        self._shape = (len(routers), experts_per_token)
        self._experts = experts
        self._record: _Record | None = None
        for layer, router in enumerate(routers):
            router.module.register_forward_hook(self._hook(layer, router))

    @property
    def layers(self) -> int:
        return self._shape[0]

    @property
    def is_open(self) -> bool:
        return self._record is not None

    def open(self, routing: Int[Tensor, "positions layers experts_per_token"], *, override: bool) -> None:
        """`override` False only measures agreement. Raises InvalidData for routing that cannot be this model's."""
        if self._record is not None:
            raise RuntimeError("a routing record is open already: the backward of the last forward has not ended")
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
        self._record = _Record(routing, override)

    def close(self) -> None:
        self._record = None

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
        """Of the open record. Raises InvalidData when a layer has not routed yet."""
        if self._record is None:
            raise RuntimeError("no routing record is open")
        agreeing = self._record.agreeing
        if missing := [layer for layer in range(self.layers) if layer not in agreeing]:
            raise InvalidData(
                "routing_unused", f"MoE layers {missing} did not route in this forward, so nothing was replayed"
            )
        counts = torch.stack([agreeing[layer] for layer in range(self.layers)]).tolist()
        return RoutingAgreement(self._record.routing.shape[0], tuple(counts))

    def _hook(self, layer: int, router: Router) -> Any:
        def replay(_module: nn.Module, _arguments: tuple[Any, ...], output: tuple[Tensor, ...]) -> Any:
            record = self._record
            if record is None:
                return None
            native = router.rule.indices(output)
            chosen = record.routing[:, layer]
            if native.shape != chosen.shape:
                raise InvalidData(
                    "routing_rows",
                    f"routing has {chosen.shape[0]} rows, layer {layer} routes {native.shape[0]} positions",
                )
            if layer not in record.agreeing:
                same = (native.sort(dim=1).values == chosen.sort(dim=1).values).all(dim=1)
                record.agreeing[layer] = same.sum()
            return router.rule.replace(router.module, output, chosen.to(native.dtype)) if record.override else None

        return replay
