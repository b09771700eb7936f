"""What a scorer process cannot do. docs/rewards.md lists the measures for users."""

import ctypes
import os
import pwd
import resource
import signal
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import InvalidData

if TYPE_CHECKING:
    # Not for the processes that are contained: it would double their start.
    from services.common.config import RewardConfig

# Linux, <linux/prctl.h> and <linux/landlock.h>.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_VERSION = 1
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2
CAPABILITY_VERSION_3 = 0x20080522
# The first that can keep signals in.
LANDLOCK_ABI = 6

NOBODY = "nobody"
# Of at most 1,000.
OOM_SCORE = "500"
OPEN_FILES = 1_024
# A judge's weights may be that large, a log should not be.
FILE_BYTES = 16 * 2**30
# Processes and threads of one user: of one who runs nothing else, and of the service's, who does.
PROCESSES_ALONE, PROCESSES_SHARED = 1_024, 16_384

# Nothing here is a secret; a proxy's address may be one, and HF_TOKEN is.
ENVIRONMENT = frozenset(
    {"PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"}
)
ENVIRONMENT_PREFIXES = ("LC_", "OMP_", "OPENBLAS_", "MKL_", "PYTHON")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Containment:
    """As configured. `memory_mib` limits each process, `user` is a user's name, `environment` names variables."""

    memory_mib: int | None = 2_048
    user: str | None = None
    environment: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: "RewardConfig") -> "Containment":
        return cls(config.scorer_memory_mib, config.scorer_user, list(config.scorer_environment))

    def variables(self, all_variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of scorer processes."""
        named = ENVIRONMENT.union(self.environment)
        kept = {
            key: value for key, value in all_variables.items() if key in named or key.startswith(ENVIRONMENT_PREFIXES)
        }
        # Each process is one of reward.workers: threads of numeric libraries would only be in each other's way.
        return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **kept, "PYTHONPATH": _search_path()}


@dataclass(frozen=True)
class User:
    name: str
    uid: int
    gid: int
    home: str


def protect_service() -> None:
    """Keeps processes of the same user from reading this one's memory and environment."""
    _prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """A process below this one whose parent ends becomes this one's child, whatever its session."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def go_first() -> None:
    """Where memory runs out, the kernel ends this process and what it starts before others."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def find_user(name: str | None) -> User | None:
    """Who scorers run as, or None for the user of this process.

    Without a name that is nobody where this process may change its user and nobody can read the Python environment.
    Raises InvalidData("scorer_user").
    """
    if name is None and os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(name or NOBODY)
    except KeyError as error:
        if name is None:
            return None
        raise InvalidData("scorer_user", f"reward.scorer_user is {name!r}, expected a user of this machine") from error
    if entry.pw_uid == os.geteuid():
        return None
    user = User(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)
    if (problem := _try_as(user)) is None:
        return user
    if name is None:
        return None
    raise InvalidData("scorer_user", f"reward.scorer_user is {name!r}: {problem}")


def contain(memory_mib: int | None, user: User | None, parent: int) -> list[str]:
    """Restricts this process permanently, and ends it with its parent. Returns the measures that are missing here."""
    missing = []
    os.setsid()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    if memory_mib is not None:
        # Private memory that can be written. The address space (RLIMIT_AS) would not do: allocators, thread arenas and
        # CUDA reserve many times what they use.
        _limit(resource.RLIMIT_DATA, memory_mib * 2**20)
    _limit(resource.RLIMIT_NPROC, PROCESSES_ALONE if user is not None else PROCESSES_SHARED)
    if user is not None:
        _become(user)
        os.environ.update(HOME=user.home, USER=user.name)
    elif os.geteuid() == 0:
        _drop_capabilities()
        missing.append("user")
    if not _prctl(PR_SET_NO_NEW_PRIVS, 1):
        missing.append("no_new_privs")
    if not _keep_signals_in():
        missing.append("landlock")
    # After the change of user, which undoes it.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    return missing


def _search_path() -> str:
    return os.pathsep.join(str(Path(part).resolve()) for part in sys.path)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _become(user: User) -> None:
    os.setgroups([])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def _try_as(user: User) -> str | None:
    """What keeps scorers from running as `user`; tried in a process that ends at once."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        problem = "not known"
        try:
            _become(user)
            problem = next((f"it cannot read {path}" for path in _needed() if not os.access(path, os.R_OK)), "")
        except OSError as error:
            problem = f"this process may not become it ({error.strerror})"
        finally:
            os.write(writing, problem.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        problem = pipe.read().decode()
    os.waitpid(child, 0)
    return problem or None


def _needed() -> list[str]:
    return [sys.prefix, sysconfig.get_path("stdlib"), *(path for path in sys.path if Path(path).exists())]


def _drop_capabilities() -> None:
    """root without any is bound by file permissions like others, and may not trace, mount or load."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


def _keep_signals_in() -> bool:
    """With Landlock, neither a signal nor a trace reaches a process outside, though it be the same user's.

    Files and network are left alone: scorers read models and ask judges, and a sandbox of their own must work.
    """
    abi = _syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    if abi < LANDLOCK_ABI:
        return False
    rules = _Ruleset(0, 0, SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL)
    ruleset = _syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    done = _syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _syscall(number: int, *arguments: Any) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *words))


def _prctl(option: int, value: int) -> bool:
    zero = ctypes.c_ulong(0)
    return bool(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) == 0)
