"""From a device to the CPU in one transfer: every transfer waits for the device and costs as much as a small kernel."""

from collections.abc import Mapping

import numpy as np
import torch


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The tensors as NumPy arrays of their own dtypes and shapes.

    From the CPU they are views. From another device they travel as one float64 tensor, which holds FP32, float64, bool
    and every integer up to 2^53 as they are.

    Args:
        tensors: by name, all on one device; bool, integer, FP32 or float64.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return {name: tensor.numpy() for name, tensor in tensors.items()}
    packed = torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors.values()])
    return {
        name: part.to(tensor.dtype).view(tensor.shape).numpy()
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }
