"""What a batch must know about its model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """What replay data must fit. `packs` is False where sequences in one row would see each other."""

    model_type: str
    vocabulary: int
    moe_layers: int
    experts: int
    experts_per_token: int
    packs: bool

    @property
    def replay_bytes_per_token(self) -> int:
        """No tensor of a sample's replay takes more: every token of the vocabulary, or every expert in two bytes."""
        return max(4 * self.vocabulary, 2 * self.moe_layers * self.experts_per_token)
