"""Sharding by DeepSpeed's ZeRO-3. With deepspeed_engine the only module that imports deepspeed."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.common.config import Config
from services.trainer.engine.deepspeed_config import deepspeed_config, inference_config


@contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """DeepSpeed may cast buffers with the parameters; rotary frequencies and routing biases need their digits."""
    originals = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    for name, original in originals.items():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        current = holder.get_buffer(leaf)
        if current.dtype != original.dtype:
            holder._buffers[leaf] = original.to(current.device)


class ZeroSharding:
    """Over the ranks of the process group, which must be joined. Rank 0 reads."""

    def __init__(self, config: Config, device: torch.device) -> None:
        import deepspeed

        self._config, self._device = config, device
        # An engine shards what is not sharded yet by the settings of what is: this module has one parameter to ask.
        seed = nn.ParameterList([torch.zeros(1)])
        deepspeed.zero.Init(module=seed, config_dict_or_path=deepspeed_config(config))
        self._seed: Any = seed[0]

    @property
    def reads(self) -> bool:
        return dist.get_rank() == 0

    def is_sharded(self, parameter: Tensor) -> bool:
        return hasattr(parameter, "ds_id")

    def shard(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        for parameter in parameters:
            if self.is_sharded(parameter):
                continue
            kept = dtype if parameter.is_floating_point() else parameter.dtype
            if self.reads:
                parameter.data = parameter.data.to(self._device, kept).contiguous()
            else:
                parameter.data = torch.empty(parameter.shape, dtype=kept, device=self._device)
            self._seed.convert_to_zero_parameters([parameter])

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(parameters))
        return gathered

    def share(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if not tensor.numel():
                continue
            sent = tensor.detach().to(self._device).contiguous()
            dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)
            tensor.copy_(sent)

    def inference(self, module: nn.Module) -> nn.Module:
        import deepspeed

        dtype = next(module.parameters()).dtype
        with keeping_buffers(module):
            engine, *_ = deepspeed.initialize(
                model=module, config=inference_config(self._config, dtype), dist_init_required=False
            )
        engine.eval()
        served: nn.Module = engine
        return served
