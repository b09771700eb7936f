"""What `helm test` runs: Redis answers, each service is ready and keeps its metrics closed, weights are published."""

import argparse
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import redis

CALL_SECONDS = 5.0
LOOK_SECONDS = 1.0


def main(argv: list[str] | None = None) -> int:
    """0 when every check holds within the time, 1 with the reasons of those that do not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url-file", type=Path, required=True)
    parser.add_argument("--service", action="append", default=[], metavar="HOST:PORT", help="repeatable")
    parser.add_argument("--weights", metavar="STREAM", help="the stream that announces policy versions")
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args(argv)
    url = arguments.redis_url_file.read_text(encoding="utf-8").strip()
    checks: dict[str, Callable[[], None]] = {"redis answers": partial(check_redis, url)}
    for service in arguments.service:
        checks[f"{service} is ready"] = partial(check_ready, service)
        checks[f"{service}/metrics needs the token"] = partial(check_closed, service)
    if arguments.weights:
        checks["weights are published"] = partial(check_weights, url, arguments.weights)
    deadline = time.monotonic() + arguments.seconds
    failed = [name for name, check in checks.items() if not holds(name, check, deadline)]
    return 1 if failed else 0


def holds(name: str, check: Callable[[], None], deadline: float) -> bool:
    while True:
        try:
            check()
        except (OSError, CheckFailed, redis.RedisError) as error:
            if time.monotonic() > deadline:
                sys.stdout.write(f"FAILED {name}: {error}\n")
                return False
            time.sleep(LOOK_SECONDS)
        else:
            sys.stdout.write(f"ok {name}\n")
            return True


class CheckFailed(Exception):
    pass


def check_redis(url: str) -> None:
    with redis.Redis.from_url(url, socket_timeout=CALL_SECONDS, socket_connect_timeout=CALL_SECONDS) as client:
        client.ping()


def check_weights(url: str, stream: str) -> None:
    with redis.Redis.from_url(url, socket_timeout=CALL_SECONDS, socket_connect_timeout=CALL_SECONDS) as client:
        if client.xlen(stream) == 0:
            raise CheckFailed(f"stream {stream} is empty")


def check_ready(base: str) -> None:
    with urllib.request.urlopen(f"http://{base}/readyz", timeout=CALL_SECONDS):
        return


def check_closed(base: str) -> None:
    try:
        with urllib.request.urlopen(f"http://{base}/metrics", timeout=CALL_SECONDS):
            raise CheckFailed("answered without a token")
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise


if __name__ == "__main__":
    sys.exit(main())
