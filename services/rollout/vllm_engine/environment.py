"""Settings that vLLM reads from the environment as it is imported."""

import os

DEFAULTS = {
    # No network beyond the run's own.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # At each reload vLLM warns of tied weights, as if something were missing.
    "VLLM_LOGGING_LEVEL": "ERROR",
    # GiB for the key-value cache where the model runs on CPUs.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Several processes share the cores: binding each to all of them would stack their threads on the first ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Without binding, the worker can live in the engine's own process: one process and one hop a token less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_defaults() -> None:
    """Variables that are set already are kept."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
