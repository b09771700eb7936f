"""Three models by their dimensions: parameters, FLOPs and cache bytes follow from them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupedAttention:
    """`kv_heads` keys and values shared by `heads` queries; `head_norms` for RMS norms on queries and keys."""

    heads: int
    kv_heads: int
    head_size: int
    head_norms: bool = True

    def parameters(self, hidden: int) -> int:
        projections = hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return projections + (2 * self.head_size if self.head_norms else 0)

    @property
    def score_sizes(self) -> int:
        """Multiplications for one query against one position: q·k and the weighted sum of v, over all heads."""
        return 2 * self.heads * self.head_size

    @property
    def cached_values(self) -> int:
        """Numbers in the KV cache for each token and layer."""
        return 2 * self.kv_heads * self.head_size

    @property
    def activations(self) -> int:
        """Numbers kept for backward for each token: queries, keys, values, and what goes into the output projection."""
        return self.head_size * (2 * self.heads + 2 * self.kv_heads)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent for all heads."""

    heads: int
    query_rank: int
    latent_rank: int
    rope_size: int
    nope_size: int
    value_size: int

    def parameters(self, hidden: int) -> int:
        query = hidden * self.query_rank + self.query_rank * self.heads * (self.nope_size + self.rope_size)
        latent = hidden * (self.latent_rank + self.rope_size)
        expand = self.latent_rank * self.heads * (self.nope_size + self.value_size)
        output = self.heads * self.value_size * hidden
        return query + latent + expand + output + self.query_rank + self.latent_rank

    @property
    def score_sizes(self) -> int:
        return self.heads * (self.nope_size + self.rope_size + self.value_size)

    @property
    def cached_values(self) -> int:
        return self.latent_rank + self.rope_size

    @property
    def activations(self) -> int:
        keys_and_queries = 2 * self.heads * (self.nope_size + self.rope_size)
        return keys_and_queries + 2 * self.heads * self.value_size + self.query_rank + self.cached_values


@dataclass(frozen=True)
class Experts:
    """`per_token` of `count` experts, and `shared` ones that every token passes; all of `size` inner units."""

    count: int
    per_token: int
    size: int
    shared: int = 0


@dataclass(frozen=True)
class Architecture:
    """A decoder with gated (SwiGLU) MLPs and untied embeddings. The first `dense_layers` have no experts."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    attention: GroupedAttention | LatentAttention
    dense_size: int = 0
    dense_layers: int = 0
    experts: Experts | None = None

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def parameters(self) -> int:
        return self._count(active=False)

    @property
    def active_parameters(self) -> int:
        """Those that one token passes, embeddings and output matrix included."""
        return self._count(active=True)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest decoder layer, which ZeRO-3 gathers whole."""
        size = self._moe_size(active=False) if self.experts else 3 * self.hidden * self.dense_size
        return self._attention_size + size

    @property
    def largest_parameter(self) -> int:
        """A layer's experts' gate and up projections, which transformers fuses; of a dense model the embedding."""
        fused = self.experts.count * 2 * self.hidden * self.experts.size if self.experts else 0
        return max(fused, self.vocabulary * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        """In 16-bit numbers, over all layers."""
        return 2 * self.layers * self.attention.cached_values

    @property
    def routing_choices(self) -> int:
        """Expert ids captured for each forwarded token, L·K; 0 for a dense model."""
        return self.moe_layers * self.experts.per_token if self.experts else 0

    @property
    def routing_dtype(self) -> str:
        return "uint16" if self.experts and self.experts.count > 256 else "uint8"

    def forward_flops(self, length: int) -> float:
        """For each token of a causal sequence of `length`: 2·N_active and attention over half of it on average.

        The embedding is a look-up, and log-probs over small candidate sets read few rows of the output matrix: the two
        are left out. (Kaplan et al. 2020, arXiv 2001.08361, section 2.1; attention as in PaLM, arXiv 2204.02311,
        appendix B, halved by causality.)
        """
        weights = self.active_parameters - 2 * self.vocabulary * self.hidden
        return 2.0 * weights + self.layers * self.attention.score_sizes * length

    def _count(self, *, active: bool) -> int:
        ends = 2 * self.vocabulary * self.hidden + self.hidden
        dense_layers = self.layers - self.moe_layers
        return (
            ends
            + self.layers * self._attention_size
            + dense_layers * 3 * self.hidden * self.dense_size
            + self.moe_layers * self._moe_size(active=active)
        )

    @property
    def _attention_size(self) -> int:
        return self.attention.parameters(self.hidden) + 2 * self.hidden

    def _moe_size(self, *, active: bool) -> int:
        if self.experts is None:
            return 0
        run = self.experts.per_token if active else self.experts.count
        return 3 * self.hidden * self.experts.size * (run + self.experts.shared) + self.hidden * self.experts.count


DENSE_8B = Architecture(
    name="8B dense",
    hidden=4096,
    layers=36,
    vocabulary=151_936,
    attention=GroupedAttention(heads=32, kv_heads=8, head_size=128),
    dense_size=12_288,
    dense_layers=36,
)
MOE_30B = Architecture(
    name="30B-A3B",
    hidden=2048,
    layers=48,
    vocabulary=151_936,
    attention=GroupedAttention(heads=32, kv_heads=4, head_size=128),
    experts=Experts(count=128, per_token=8, size=768),
)
MOE_671B = Architecture(
    name="671B MoE",
    hidden=7168,
    layers=61,
    vocabulary=129_280,
    attention=LatentAttention(heads=128, query_rank=1536, latent_rank=512, rope_size=64, nope_size=128, value_size=128),
    dense_size=18_432,
    dense_layers=3,
    experts=Experts(count=256, per_token=8, size=2048, shared=1),
)
MODELS = (DENSE_8B, MOE_30B, MOE_671B)
