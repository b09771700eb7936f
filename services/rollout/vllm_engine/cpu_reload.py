"""Makes vLLM's reload_weights exact on CPUs.

vLLM 0.32 packs weights for its CPU kernels when it loads a model. On a reload it forgets two of them, without an error:
expert weights are left unpacked while the kernel still reads them as packed, and an output head that is tied to the
embeddings keeps its packed copy of the old ones.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def pack_experts_on_reload(model: torch.nn.Module) -> None:
    """Once after the first load."""
    for module in model.modules():
        if isinstance(module, MoERunner):
            method = module.routed_experts.quant_method
            if isinstance(method, UnquantizedFusedMoEMethod) and _packs(method):
                _wrap(method)


def pack_heads(model: torch.nn.Module) -> None:
    """After every reload."""
    for module in model.modules():
        # Only the CPU path keeps a packed copy of the weight.
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _packs(method: Any) -> bool:
    return method.moe_kernel is not None and isinstance(method.moe_kernel.fused_experts, CPUUnquantizedExperts)


def _wrap(method: Any) -> None:
    setup = method._setup_kernel

    def setup_and_pack(**arguments: Any) -> None:
        setup(**arguments)
        method.moe_kernel.fused_experts.process_weights_after_loading(arguments["layer"])

    # The kernel exists by now, so that every further call is a reload.
    method._setup_kernel = setup_and_pack
