import asyncio

import pytest

from services.rollout.engine.tasks import together


async def value(number):
    return number


async def test_results_come_in_order():
    async def late(number):
        for _ in range(3 - number):
            await asyncio.sleep(0)
        return number

    assert await together([late(0), late(1), late(2)]) == [0, 1, 2]


async def test_one_failure_ends_the_others_and_is_raised_as_it_is():
    ended = []

    async def waits(number):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def fails():
        await asyncio.sleep(0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await together([waits(1), fails(), waits(2)])
    assert sorted(ended) == [1, 2]


async def test_cancelling_ends_all():
    begun, ended = [], []

    async def waits(number):
        begun.append(number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    task = asyncio.create_task(together([waits(1), waits(2)]))
    while len(begun) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [1, 2]
