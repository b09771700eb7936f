"""One change of weights in a running engine. Knows vLLM's calls, not vLLM."""

from typing import Any


class StaleCache(RuntimeError):
    """Keys and values of the old weights are still there."""


async def load_paused(llm: Any, path: str, label: str) -> None:
    """Loads `path` into a paused AsyncLLM and names it `label`: later tokens carry that version.

    What the old weights computed must not be read under the new ones, neither keys and values nor the routing that
    vLLM keeps beside them, so the prefix cache is emptied too. Raises StaleCache where it is not, and whatever vLLM
    raises.
    """
    await llm.collective_rpc("trivet_reload", args=(path,))
    # Pausing empties it, too; this holds for whatever reached it in between.
    if llm.vllm_config.cache_config.enable_prefix_caching and not await llm.reset_prefix_cache(
        reset_running_requests=True
    ):
        raise StaleCache("vLLM did not empty its prefix cache")
    await llm.update_weight_version(label)
