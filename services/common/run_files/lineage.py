"""Short identities of the data, code and configuration that produced something."""

import functools
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from services.common.config import Config

SERVICES = Path(__file__).resolve().parents[2]


@functools.cache
def code_version() -> str:
    """The git commit of Trivet's own work tree, marked "+" when the sources differ from it; elsewhere their digest."""
    try:
        if not _is_own_work_tree():
            return _source_digest()
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit}+{_source_digest()}" if _git("status", "--porcelain", "--", str(SERVICES)) else commit
    except (OSError, subprocess.SubprocessError):
        return _source_digest()


def config_version(config: Config) -> str:
    """The same for every service of a run, wherever it listens."""
    return xxhash.xxh3_64_hexdigest(json.dumps(without_addresses(config), sort_keys=True).encode())


def evaluation_version(config: Config) -> str:
    """Of all that a held-out score depends on apart from the policy and the rows: equal ones can be compared."""
    asked = [
        config.evaluation.model_dump(mode="json", include={"prompts", "success_reward"}),
        config.reward.model_dump(mode="json", include={"scorers", "minimum", "maximum", "normalize"}),
        config.sampling.max_tokens,
        config.data.chat_template,
        config.data.system_prompt,
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(asked, sort_keys=True).encode())


def without_addresses(config: Config) -> dict[str, Any]:
    """The configuration less tokens, passwords and addresses, on which no result depends, and what prepares a run."""
    kept = {name: section for name, section in config.dump().items() if name not in {"redis", "blobs", "prepare"}}
    for service in ("rollout", "reward", "trainer"):
        kept[service] = {name: value for name, value in kept[service].items() if name != "server"}
    return kept


def data_version(rows: Iterable[str]) -> str:
    digest = xxhash.xxh3_64()
    for row in rows:
        digest.update(row.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _is_own_work_tree() -> bool:
    """Whether git keeps these very files: an environment inside another repository is part of that one's tree."""
    if Path(_git("rev-parse", "--show-toplevel")).resolve() != SERVICES.parent:
        return False
    return bool(_git("ls-files", "--", str(Path(__file__).resolve())))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(SERVICES), *arguments]
    # Within a git hook they would name that hook's repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10, env=environment)
    return ended.stdout.strip()


def _source_digest() -> str:
    return data_version(path.read_text(encoding="utf-8") for path in sorted(SERVICES.rglob("*.py")))
