"""Blocks whose saved tensors wait in host memory."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.written.runtime.found_blocks import NAME, found

BLOCKS: list[str] = []


def pack(stays: set[int], tensor: Tensor) -> Any:
    """Return what brings a saved tensor back: a copy on the host, with its strides."""
    if tensor.device.type == "cpu" or tensor.untyped_storage()._cdata in stays:
        # a result that is held refers to what holds it; torch leaves versions to whoever packs
        return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    flat = tensor.as_strided((extent if tensor.numel() else 0,), (1,))
    host = torch.empty(flat.size(), dtype=flat.dtype, pin_memory=True).copy_(flat)
    return host, tensor.device, tensor.size(), tensor.stride()


def unpack(packed: Any) -> Any:
    """Return a saved tensor on its device."""
    if len(packed) == 2:
        tensor: Tensor = packed[0]
        if tensor._version != packed[1]:
            problem = f"a tensor of {list(tensor.shape)} that backward needs was written to in place"
            raise RuntimeError(f"{NAME}: {problem}; write to it after backward, or to a copy")
        return tensor
    host, device, size, stride = packed
    return host.to(device).as_strided(size, stride)


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the block's own forward; what it saves goes to the host, but for parameters and buffers."""
    if not torch.is_grad_enabled():
        return type(block).forward(block, *args, **kwargs)
    stays = {each.untyped_storage()._cdata for each in (*block.parameters(), *block.buffers())}
    with saved_tensors_hooks(partial(pack, stays), unpack):
        return type(block).forward(block, *args, **kwargs)


def apply(model: nn.Module) -> nn.Module:
    """Return `model`, of whose `BLOCKS` all that waits for backward waits on the host."""
    for block in found(model, BLOCKS).values():
        block.forward = partial(forward, block)  # type: ignore[method-assign]
    return model
