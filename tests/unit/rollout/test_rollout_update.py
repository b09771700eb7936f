"""The update at vLLM's seam: a fake AsyncLLM that keeps a prefix cache as vLLM's scheduler does."""

from types import SimpleNamespace

import pytest

from services.rollout.update import StaleCache, load_paused


class FakeLlm:
    def __init__(self, *, caching, resets=True):
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))
        self.weights, self.label = "old", "0:"
        self.cached = {"a prompt": "old"} if caching else {}
        self.running = ["a paused request"]
        self._resets = resets

    async def collective_rpc(self, method, args):
        assert method == "trivet_reload"
        (self.weights,) = args

    async def reset_prefix_cache(self, *, reset_running_requests=False):
        # As vLLM does: blocks in use stay, unless their requests are preempted.
        if not self._resets or (self.running and not reset_running_requests):
            return False
        self.running, self.cached = [], {}
        return True

    async def update_weight_version(self, label):
        # Tokens of this version must not see what others computed.
        assert all(weights == self.weights for weights in self.cached.values())
        self.label = label


@pytest.mark.parametrize("caching", [True, False])
async def test_nothing_of_the_old_weights_is_left(caching):
    llm = FakeLlm(caching=caching)
    await load_paused(llm, "weights/3", "3:00ff")
    assert (llm.weights, llm.label, llm.cached) == ("weights/3", "3:00ff", {})
    # Without a cache nobody is preempted for it.
    assert bool(llm.running) != caching


async def test_a_cache_that_stays_is_an_error_and_no_version():
    llm = FakeLlm(caching=True, resets=False)
    with pytest.raises(StaleCache, match="prefix cache"):
        await load_paused(llm, "weights/3", "3:00ff")
    assert llm.label == "0:"


async def test_the_calls_are_those_that_vllm_has():
    """Names and keywords, from the installed source: importing vLLM takes longer than all of these tests."""
    import ast
    import importlib.util
    from pathlib import Path

    origin = importlib.util.find_spec("vllm").origin
    tree = ast.parse((Path(origin).parent / "v1/engine/async_llm.py").read_text(encoding="utf-8"))
    (llm,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AsyncLLM"]
    methods = {node.name: node for node in llm.body if isinstance(node, ast.AsyncFunctionDef)}
    assert {"collective_rpc", "update_weight_version", "pause_generation", "resume_generation"} <= methods.keys()
    assert "reset_running_requests" in [argument.arg for argument in methods["reset_prefix_cache"].args.args]
