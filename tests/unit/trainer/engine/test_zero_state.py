"""The parts that need no sharding; DeepSpeed's own optimizers are in the integration tests."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from services.trainer.engine.zero_state import LARGEST_WEIGHT, Fragment, all_finite, digest, loading


def made(values: Tensor | None = None, *, name: str = "a", state: str = "fp32", start: int = 0) -> list[Fragment]:
    values = torch.tensor([1.0, -0.0, float("nan")]) if values is None else values
    return [Fragment(name, state, start, values), Fragment("b", "step", 0, torch.tensor(2.0))]


@pytest.mark.parametrize(
    "other",
    [
        made(name="c"),
        made(state="exp_avg"),
        made(start=1),
        made(torch.tensor([1.0, 0.0, float("nan")])),
        made(torch.tensor([1.0, -0.0])),
        made(torch.tensor([1.0, -0.0, float("nan")], dtype=torch.float64)),
        made()[:1],
        made()[::-1],
    ],
)
def test_a_digest_tells_states_apart(other: list[Fragment]) -> None:
    assert digest(made()) == digest(made())
    assert digest(other) != digest(made())


def test_every_bit_counts() -> None:
    seen = {digest(made())}
    for position in range(3):
        for bit in range(32):
            values = made()[0].values.clone()
            values.view(torch.int32)[position] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            seen.add(digest(made(values)))
    assert len(seen) == 1 + 3 * 32


def test_a_slice_digests_like_its_copy() -> None:
    flat = torch.arange(10.0)
    assert digest(made(flat[3:6])) == digest(made(flat[3:6].clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("number", "of_a_weight", "of_a_moment"),
    [
        (1.0, True, True),
        (-60000.0, True, True),
        (1e5, False, True),
        (-1e37, False, True),
        (float("inf"), False, False),
        (float("nan"), False, False),
    ],
)
def test_weights_are_finite_and_no_larger_than_float16_holds(
    number: float, of_a_weight: bool, of_a_moment: bool, dtype: torch.dtype
) -> None:
    values = torch.tensor([0.0, number, 1.0], dtype=dtype)
    assert all_finite(made(values)) is of_a_weight
    assert all_finite(made(values, state="exp_avg_sq")) is of_a_moment


def test_the_largest_weight_is_still_one() -> None:
    assert all_finite(made(torch.tensor([LARGEST_WEIGHT, -LARGEST_WEIGHT])))
    assert all_finite([])


def test_loading_keeps_the_settings_and_gives_each_partition_its_own_step() -> None:
    flats = [torch.zeros(4, requires_grad=True), torch.zeros(2, requires_grad=True)]
    groups = [{"params": flats[:1], "weight_decay": 0.1}, {"params": flats[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    zero = SimpleNamespace(optimizer=optimizer, clip_grad=0.5)
    with loading(zero):
        step = torch.tensor(7.0)
        for group, flat in zip(optimizer.param_groups, flats, strict=True):
            group.update(weight_decay=0.3, betas=(0.1, 0.1), params=[flat])
            optimizer.state[flat] = {
                "step": step,
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
        zero.clip_grad = 9.0
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.999)}
    assert zero.clip_grad == 0.5
    for flat in flats:
        flat.grad = torch.ones_like(flat)
    optimizer.step()
    assert [float(optimizer.state[flat]["step"]) for flat in flats] == [8.0, 8.0]
