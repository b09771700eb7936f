"""What ZeRO keeps of a model's training state on one rank, by parameter: fp32 values and optimizer state.

Flat partitions end in padding that ZeRO-3 never initialises, so nothing here reads it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from jaxtyping import UInt8
from torch import Tensor, nn

VALUE = "fp32"
# float16's largest number. A weight beyond it is what a step left that went wrong, whatever dtype the model has.
LARGEST_WEIGHT = 65504.0


class Fragment(NamedTuple):
    """`values` are those of the flattened parameter from `start` on; a scalar (Adam's step) has no place in it."""

    parameter: str
    state: str
    start: int
    values: Tensor


def fragments(module: nn.Module, zero: Any) -> Iterator[Fragment]:
    """Of every trained parameter, as far as this rank holds it; `zero` is the ZeRO optimizer, of any stage.

    Optimizer state is there from the first step on.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        located = _partition_of(parameter, zero) if hasattr(parameter, "ds_id") else _slice_of(parameter, zero)
        if located is None:
            continue
        start, flat, offset, size = located
        yield Fragment(name, VALUE, start, flat.detach().narrow(0, offset, size))
        state = zero.optimizer.state.get(flat, {})
        for key in sorted(state):
            if torch.is_tensor(state[key]) and state[key].shape == flat.shape:
                yield Fragment(name, key, start, state[key].narrow(0, offset, size))
            else:
                yield Fragment(name, key, 0, torch.as_tensor(state[key]))


def digest(found: Iterable[Fragment]) -> bytes:
    """16 bytes of names, places, dtypes and every bit of the values, in the order given."""
    hasher = xxhash.xxh3_128()
    for name, state, start, values in found:
        hasher.update(f"{name} {state} {start} {values.dtype} {values.numel()}\n".encode())
        hasher.update(_bytes(values).numpy().data)
    return hasher.digest()


def all_finite(found: Iterable[Fragment]) -> bool:
    """Whether all are finite, and no parameter is larger than LARGEST_WEIGHT."""
    # One read of each tensor and no copy: NaN and infinity both reach an extreme.
    extremes = [
        (extreme, LARGEST_WEIGHT if state == VALUE else torch.finfo(torch.float32).max)
        for _, state, _, values in found
        if values.numel()
        for extreme in values.aminmax()
    ]
    if not extremes:
        return True
    # A scalar of the optimizer may lie elsewhere than the rest.
    device = max((extreme.device for extreme, _ in extremes), key=lambda each: each.type == "cuda")
    sizes = torch.stack([extreme.to(device, torch.float32) for extreme, _ in extremes]).abs()
    return bool((sizes <= torch.tensor([largest for _, largest in extremes], device=device)).all())


@contextmanager
def loading(zero: Any) -> Iterator[None]:
    """Undoes the side effects of DeepSpeed's loaders.

    Decay, betas and clipping stay those of this run's configuration; ZeRO-3 would take the first parameter group's for
    all. ZeRO-3 also gives all sub-groups one step tensor, which each of them would count up at every step.
    """
    settings = [{key: group[key] for key in group if key != "params"} for group in zero.optimizer.param_groups]
    clip_grad = zero.clip_grad
    yield
    for group, own in zip(zero.optimizer.param_groups, settings, strict=True):
        group.update(own)
    zero.clip_grad = clip_grad
    for flat, state in zero.optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(flat.device, copy=True)


def _bytes(values: Tensor) -> UInt8[Tensor, "bytes"]:
    return values.detach().cpu().contiguous().flatten().view(torch.uint8)


def _slice_of(parameter: Any, zero: Any) -> tuple[int, Tensor, int, int] | None:
    """ZeRO 1 and 2 shard the concatenation of a group's parameters, so a rank may hold part of one, or none of it."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    (flat,) = zero.optimizer.param_groups[mapping.param_group_index]["params"]
    return mapping.lp_fragment_address.start, flat, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel


def _partition_of(parameter: Any, zero: Any) -> tuple[int, Tensor, int, int] | None:
    """ZeRO-3 shards each parameter into equal partitions, the last ones padded."""
    group, offset, padded = zero.grad_position[zero.get_param_id(parameter)]
    start = padded * dist.get_rank(parameter.ds_process_group)
    size = min(padded, parameter.ds_numel - start)
    return (start, zero.fp32_partitioned_groups_flat[group], offset, size) if size > 0 else None
