"""Products of matrix rows at ragged pairs (row, id), in memory that does not grow with the number of pairs times width.

float32 and float64 run in torch's embedding-bag kernels, which read the rows in place. Those round bf16 sums to bf16,
so bf16 rows are widened to float32 in pieces of `BLOCK_ELEMENTS` instead.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

BLOCK_ELEMENTS = 2**22


def sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def blocks(total: int, width: int) -> Iterator[slice]:
    """Slices of 0..total, each of about BLOCK_ELEMENTS elements when one item has `width`."""
    size = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def pair_dots(
    queries: Float[Tensor, "rows hidden"],
    table: Float[Tensor, "entries hidden"],
    counts: Int[Tensor, "rows"],
    ids: Int[Tensor, "candidates"],
) -> Float[Tensor, "candidates"]:
    """queries[row] · table[id] for the first counts[0] ids with row 0, and so on."""
    if _in_place(queries, table):
        # The derivative of a weighted bag sum by its weights is this very product.
        with torch.enable_grad():
            weights = torch.ones(len(ids), dtype=table.dtype, device=table.device, requires_grad=True)
            sums = _bag(table.detach(), ids, counts, weights)
        return torch.autograd.grad(sums, weights, queries.detach())[0]
    dtype = sum_dtype(queries)
    rows = row_of_pair(counts)
    dots = torch.empty(len(ids), dtype=dtype, device=queries.device)
    for part in blocks(len(ids), queries.shape[1]):
        dots[part] = torch.einsum("ph,ph->p", queries[rows[part]].to(dtype), table[ids[part]].to(dtype))
    return dots


def bag_sums(
    table: Float[Tensor, "entries hidden"],
    counts: Int[Tensor, "rows"],
    ids: Int[Tensor, "candidates"],
    coefficients: Float[Tensor, "candidates"],
) -> Float[Tensor, "rows hidden"]:
    """Σ coefficient · table[id] over the pairs of each row."""
    if _in_place(table, coefficients):
        return _bag(table.detach(), ids, counts, coefficients)
    rows = row_of_pair(counts)
    sums = torch.zeros(len(counts), table.shape[1], dtype=coefficients.dtype, device=table.device)
    for part in blocks(len(ids), table.shape[1]):
        sums.index_add_(0, rows[part], coefficients[part, None] * table[ids[part]].to(sums.dtype))
    return sums


def transposed_bag_sums(
    queries: Float[Tensor, "rows hidden"],
    counts: Int[Tensor, "rows"],
    ids: Int[Tensor, "candidates"],
    coefficients: Float[Tensor, "candidates"],
    entries: int,
) -> Float[Tensor, "entries hidden"]:
    """Σ coefficient · queries[row] over the pairs of each id."""
    order = ids.argsort(stable=True)
    return bag_sums(queries, torch.bincount(ids, minlength=entries), row_of_pair(counts)[order], coefficients[order])


def row_of_pair(counts: Int[Tensor, "rows"]) -> Int[Tensor, "candidates"]:
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


def _in_place(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.dtype in {torch.float32, torch.float64}


def _bag(table: Tensor, ids: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    return embedding_bag(ids, table, counts.cumsum(0) - counts, mode="sum", per_sample_weights=weights)
