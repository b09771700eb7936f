"""Rows in an order that the seed alone decides."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from services.common.data.rows import Row
from services.common.errors import InvalidData

Row_co = TypeVar("Row_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True)
class RowSet(Generic[Row_co]):
    """Rows in an order that the seed alone decides: request i is always one row, so a cursor is the whole state."""

    rows: Sequence[Row_co]
    seed: int
    shuffle: bool

    def __getitem__(self, request: int) -> Row_co:
        epoch, position = divmod(request, len(self.rows))
        return self.rows[row_order(self.seed, epoch, len(self.rows))[position]] if self.shuffle else self.rows[position]

    def __len__(self) -> int:
        return len(self.rows)


@lru_cache(maxsize=4)
def row_order(seed: int, epoch: int, size: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(size).tolist()  # type: ignore[no-any-return]


def split_off(rows: Sequence[T], ratio: float, seed: int) -> tuple[list[T], list[T]]:
    """Rows to train on and rows to hold out: the latter a share of `ratio`, one at least."""
    held_out = set(row_order(seed, 0, len(rows))[: max(1, round(len(rows) * ratio))])
    return (
        [row for index, row in enumerate(rows) if index not in held_out],
        [row for index, row in enumerate(rows) if index in held_out],
    )


def use_rows(rows: Iterable[Row], use: Callable[[Row], T | None]) -> tuple[list[T], int]:
    """What `use` makes of each row, and how many it left out (None).

    Raises the first row's InvalidData, which then also says how many others cannot be used.
    """
    used: list[T] = []
    left_out = 0
    refused: list[tuple[str, InvalidData]] = []
    for row in rows:
        try:
            made = use(row)
        except InvalidData as error:
            sentence = str(error) if row.where in str(error) else f"{row.where}: {error}"
            refused.append((row.where, InvalidData(error.code, sentence)))
            continue
        if made is None:
            left_out += 1
        else:
            used.append(made)
    if len(refused) > 1:
        first, following = refused[0][1], refused[1][0]
        raise InvalidData(first.code, f"{first}; {len(refused) - 1} more rows cannot be used, the next is {following}")
    if refused:
        raise refused[0][1]
    return used, left_out
