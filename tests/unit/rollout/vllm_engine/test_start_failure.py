import logging
import multiprocessing

import pytest

from services.common.config import ConfigError
from services.common.errors import Unavailable
from services.rollout.vllm_engine.start_failure import keep_first_failure, naming_failure


def core(*errors):
    """What a process of vLLM does that fails: it logs why, and ends."""
    keep_first_failure()
    for error in errors:
        logging.getLogger("vllm").error("failed to start", exc_info=error)


def start(method, *errors):
    process = multiprocessing.get_context(method).Process(target=core, args=errors)
    process.start()
    process.join()
    raise RuntimeError(
        "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_reason_is_the_first_that_a_process_of_vllm_gives(method):
    first = ValueError("No available memory\nfor the cache blocks.")
    with pytest.raises(Unavailable) as failure, naming_failure():
        start(method, first, RuntimeError("a worker failed"))
    assert failure.value.code == "engine_start"
    assert str(failure.value) == "ValueError: No available memory for the cache blocks. (vLLM did not start)"


def test_without_one_it_is_what_vllm_says_of_the_process():
    words = "^RuntimeError: .*'EngineCore': -9}: memory may have run out .vLLM did not start"
    with pytest.raises(Unavailable, match=words), naming_failure():
        raise RuntimeError("Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}")


def test_options_that_cannot_work_are_left_to_the_configuration():
    with pytest.raises(ConfigError, match="no such option"), naming_failure():
        raise ConfigError("no such option")


def test_an_exception_of_a_running_vllm_does_no_harm():
    with naming_failure():
        keep_first_failure()
    core(ValueError("later"))
