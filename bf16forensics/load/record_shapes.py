"""The shapes that the tensors of a record must have together.

Shapes: B sequences, H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v, C width.
"""

from collections.abc import Mapping

import torch

from bf16forensics.errors import InputError


def check_core(core: Mapping[str, torch.Tensor], where: str, order: str) -> None:
    """Checks q [B, H, N, D], k [B, G, M, D], v [B, G, M, E] and, where present, do [B, H, N, E].

    Args:
        core: by name, heads before time.
        where: file, for errors.
        order: axis order of the file, for errors.

    Raises:
        InputError: an empty axis, or axes that do not fit, with both shapes.
    """
    q, k, v = core["q"], core["k"], core["v"]
    for name, tensor in core.items():
        if tensor.numel() == 0:
            raise InputError(f"{where}: '{name}' is empty (shape {_shown(tensor, order)}); nothing to analyse")
    _same(where, order, core, "q", "k", (0, 3), "batch and head size")
    _same(where, order, core, "k", "v", (0, 1, 2), "batch, heads and keys")
    if q.shape[1] % k.shape[1]:
        raise InputError(f"{where}: {q.shape[1]} query heads are not divisible by {k.shape[1]} key/value heads; "
                         "check the layout and the tensors")  # fmt: skip
    if "do" in core:
        do = core["do"]
        expected = (*q.shape[:3], v.shape[3])
        if tuple(do.shape) != expected:
            raise InputError(f"{where}: 'do' has shape {_shown(do, order)} but q {_shown(q, order)} and v "
                             f"{_shown(v, order)} need {_shown_shape(expected, order)}; check the layout")  # fmt: skip


def check_extras(extras: Mapping[str, torch.Tensor], core: Mapping[str, torch.Tensor], where: str) -> None:
    """Checks x [B, N, C], w_q [H*D, C] and w_k [G*D, C] against q and k and against each other.

    Raises:
        InputError: another shape, with the expected one and a hint where it is the transposed one.
    """
    batch, heads, queries, head_size = core["q"].shape
    rows = {"w_q": heads * head_size, "w_k": core["k"].shape[1] * head_size}
    width: int | None = None
    if "x" in extras:
        x = extras["x"]
        if x.dim() != 3 or tuple(x.shape[:2]) != (batch, queries) or x.shape[2] == 0:
            raise InputError(f"{where}: 'x' has shape {list(x.shape)}, expected [{batch}, {queries}, C]")
        width = x.shape[2]
    for name in ("w_q", "w_k"):
        if name not in extras:
            continue
        weight = extras[name]
        if weight.dim() == 2 and weight.shape[0] == rows[name] and weight.shape[1] == (width or weight.shape[1]):
            if weight.shape[1] == 0:
                raise InputError(f"{where}: '{name}' is empty (shape {list(weight.shape)}); leave it out")
            width = weight.shape[1]
            continue
        hint = ""
        if weight.dim() == 2 and weight.shape[1] == rows[name] and weight.shape[0] == (width or weight.shape[0]):
            hint = " (transposed? weights are [out, in])"
        raise InputError(f"{where}: '{name}' has shape {list(weight.shape)}, expected "
                         f"[{rows[name]}, {width or 'C'}]{hint}")  # fmt: skip


def check_mask(mask: torch.Tensor | None, sizes: tuple[int, int, int, int], where: str) -> torch.Tensor | None:
    """Brings a mask to four axes.

    Args:
        mask: [N, M] or [B or 1, H or 1, N, M]; bool or 0/1 integers (1 visible), or floating (added to the scores).
        sizes: (B, H, N, M).
        where: file, for errors.

    Returns:
        [B or 1, H or 1, N, M], bool or floating as stored; None for None.

    Raises:
        InputError: another shape or values.
    """
    if mask is None:
        return None
    batch, heads, queries, keys = sizes
    full = mask[None, None] if mask.dim() == 2 else mask
    fits = full.dim() == 4 and tuple(full.shape[2:]) == (queries, keys)
    if not fits or full.shape[0] not in (1, batch) or full.shape[1] not in (1, heads):
        raise InputError(f"{where}: 'mask' has shape {list(mask.shape)}; expected [{queries}, {keys}] or "
                         f"[{batch} or 1, {heads} or 1, {queries}, {keys}]")  # fmt: skip
    if full.is_floating_point():
        return full
    return _as_bool(full, "mask", where)


def check_positions(values: torch.Tensor | None, name: str, batch: int, keys: int, where: str) -> torch.Tensor | None:
    """Brings per-key values to [B, M]: bool for "key_padding" (True or 1 is a real key), int64 for "document_ids".

    Raises:
        InputError: another shape, or values that are not 0/1 or not integers.
    """
    if values is None:
        return None
    full = values[None].expand(batch, -1) if values.dim() == 1 else values
    if tuple(full.shape) != (batch, keys):
        raise InputError(f"{where}: '{name}' has shape {list(values.shape)}, expected [{batch}, {keys}]")
    if name == "key_padding":
        return _as_bool(full, name, where)
    if full.is_floating_point() or full.is_complex() or full.dtype == torch.bool:
        raise InputError(f"{where}: '{name}' has dtype {str(full.dtype).removeprefix('torch.')}; expected integers")
    return full.to(torch.int64)


def _as_bool(values: torch.Tensor, name: str, where: str) -> torch.Tensor:
    if values.dtype == torch.bool:
        return values
    wide = values.to(torch.float64)
    if values.is_complex() or not bool(((wide == 0) | (wide == 1)).all()):
        raise InputError(f"{where}: '{name}' holds values other than 0 and 1; expected 1 where real or visible")
    return wide == 1


def _same(
    where: str, order: str, core: Mapping[str, torch.Tensor], a: str, b: str, axes: tuple[int, ...], what: str
) -> None:
    if any(core[a].shape[axis] != core[b].shape[axis] for axis in axes):
        raise InputError(f"{where}: {a} and {b} must share {what} (layout {order}); got {_shown(core[a], order)} and "
                         f"{_shown(core[b], order)}. Check the layout and the tensors")  # fmt: skip


def _shown(tensor: torch.Tensor, order: str) -> list[int]:
    return _shown_shape(tuple(tensor.shape), order)


def _shown_shape(shape: tuple[int, ...], order: str) -> list[int]:
    return list(shape) if order == "bhtd" else [shape[0], shape[2], shape[1], shape[3]]
