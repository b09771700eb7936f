"""Whatever a scorer returns or raises is a typed outcome, and the next sample is scored."""

import asyncio
import json

import pytest
import pytest_asyncio
from trivet.v1 import sample_pb2

from services.reward.scorers.types import ScorerFailure
from tests.support.reward.pools import OpenPool

SCORER = "tests.support.reward.evil_scorers:outcome"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    async with OpenPool(SCORER, workers=1) as open_pool:
        yield open_pool


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("surrogate", "scorer_error", "ValueError: \ufffd (/"),
        ("surrogate failure", "scorer_error", "\ufffd"),
        ("surrogate code", "scorer_error", "odd"),
        ("terminal", "scorer_error", "ValueError: \ufffd[2J\ufffd"),
        ("huge int", "reward_not_finite", "returned inf"),
        ("huge fraction", "reward_not_finite", "returned inf"),
        ("decimal nan", "reward_not_finite", "returned nan"),
        ("signaling nan", "scorer_error", "cannot convert signaling NaN to float"),
        ("infinity", "reward_not_finite", "returned -inf"),
        ("complex", "scorer_error", "returned complex"),
        ("none", "scorer_error", "returned NoneType"),
        ("unreadable", "scorer_error", "returned Unreadable"),
        ("evil number", "scorer_error", "UnreadableError: (text cannot be read: KeyboardInterrupt)"),
        ("unreadable failure", "scorer_error", "(text cannot be read: ValueError)"),
        ("unreadable code", "scorer_error", "odd"),
        ("evil text", "scorer_error", "text"),
        ("unreadable error", "scorer_error", "UnreadableError: (text cannot be read: KeyboardInterrupt)"),
        ("nameless error", "scorer_error", "raised what cannot be described"),
        ("unpicklable", "scorer_error", "Unpicklable: first"),
        ("exit", "scorer_error", "SystemExit: 3"),
        ("interrupt", "scorer_error", "KeyboardInterrupt"),
        ("generator exit", "scorer_error", "GeneratorExit"),
        ("recursion", "scorer_error", "RecursionError: maximum recursion depth exceeded"),
        ("deeply nested", "scorer_error", "ValueError: (text cannot be read: RecursionError)"),
        ("enormous", "scorer_error", "ValueError: xxxx"),
        ("enormous failure", "scorer_error", "\ufffd\ufffd"),
        ("many digits", "scorer_error", "ValueError: Exceeds the limit"),
        ("abort", "scorer_crash", "its process was ended by SIGABRT"),
        ("segfault", "scorer_crash", "its process was ended by SIGSEGV"),
        ("leave", "scorer_crash", "its process ended with exit code 0"),
        ("garbage", "scorer_crash", "its reply has 4294967295 bytes, at most 65536 allowed; its process was killed"),
        ("no json", "scorer_crash", "its reply is not JSON; its process was killed"),
        ("deep json", "scorer_crash", "its reply is not JSON; its process was killed"),
        ("no outcome", "scorer_crash", "its reply is neither a finite score nor a failure; its process was killed"),
        ("infinite outcome", "scorer_crash", "its reply is neither a finite score nor a failure"),
        ("no object", "scorer_crash", "its reply is list, expected an object"),
        ("unhashable code", "scorer_crash", "its reply is neither a finite score nor a failure"),
        ("close", "scorer_crash", "its process was ended by SIGKILL"),
    ],
)
async def test_whatever_a_scorer_does_is_a_failure_with_a_code_and_a_reason(pool, name, code, words):
    outcome = await asyncio.wait_for(pool.score(SCORER, name), 30)
    assert isinstance(outcome, ScorerFailure)
    assert (outcome.code, type(outcome.reason)) == (code, str)
    assert words in outcome.reason
    assert len(outcome.reason) <= 2_000
    # protobuf refuses what is not UTF-8.
    sample_pb2.DeadLetter(reason=outcome.reason).SerializeToString()
    assert await asyncio.wait_for(pool.score(SCORER, "fine"), 30) == 1.0


@pytest.mark.parametrize("name", ["fork", "alarm"])
async def test_what_a_scorer_leaves_behind_does_not_answer_for_the_next(pool, name):
    assert await asyncio.wait_for(pool.score(SCORER, name), 30) == 1.0
    # Its alarm comes after 0.05 s.
    await asyncio.sleep(0.1)
    for _ in range(3):
        outcome = await asyncio.wait_for(pool.score(SCORER, "surrogate failure"), 30)
        assert outcome.code in {"scorer_error", "scorer_crash"}
    assert outcome.code == "scorer_error"


async def test_a_lone_surrogate_in_the_metadata_reaches_the_scorer():
    async with OpenPool("exact_match", workers=1) as open_pool:
        assert await open_pool.score("exact_match", "x", json.dumps({"answer": "\ud800"})) == 0.0
