"""The tensors of a nanoGPT model: sizes, expected shapes, causal-mask buffers, the tied head.

Shapes: C width (n_embd). Weights are [out, in].
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bf16forensics.errors import InputError
from bf16forensics.load.names import same_bits, three_of
from bf16forensics.load.nanogpt_contents import DeclaredSizes, describe

_WTE, _WPE, _HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
_LAYER = re.compile(r"transformer\.h\.(\d+)\.")
_MASK_BUFFER = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|mask|tril|causal_mask)$")
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the model, settled."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    linear_bias: bool
    norm_bias: bool


def split_buffers(tensors: Mapping[str, object]) -> tuple[dict[str, object], frozenset[str]]:
    """Parts the causal-mask buffers (which the analysis replaces by the same mask) from everything else.

    A tensor is such a buffer by its values, not by its name alone: a learned bias of the same name is not one.
    """
    buffers = frozenset(n for n, value in tensors.items() if _MASK_BUFFER.match(n) and _is_causal_mask(value))
    return {name: value for name, value in tensors.items() if name not in buffers}, buffers


def settle_head(tensors: dict[str, object], tie_weights: bool | None, where: str, notes: list[str]) -> bool:
    """Completes the pair of token embedding and output head in place.

    Returns:
        True when the two are one matrix.

    Raises:
        InputError: the file says that the head is a matrix of its own and does not hold it.
    """
    if _WTE in tensors and _HEAD in tensors:
        tied = same_bits(tensors[_WTE], tensors[_HEAD])
        if not tied:
            notes.append("lm_head and wte differ: each is used as stored (untied)")
        return tied
    if _HEAD in tensors:
        notes.append("wte absent: the tied lm_head copy is used")
        tensors[_WTE] = tensors[_HEAD]
    elif _WTE in tensors:
        if tie_weights is False:
            raise InputError(f"{where}: model_args says untied but lm_head.weight is absent: no output head, so no "
                             "loss and no gradient; give the whole checkpoint")  # fmt: skip
        tensors[_HEAD] = tensors[_WTE]
    return True


def settle_sizes(tensors: Mapping[str, object], declared: DeclaredSizes, where: str) -> Sizes:
    """Declared sizes, completed from shapes and names.

    Raises:
        InputError: no nanoGPT name in the file; the number of heads unknown or not dividing n_embd; more layers in
            the file than declared.
    """
    layers = {int(match.group(1)) for name in tensors if (match := _LAYER.match(name))}
    wanted = (_WTE, "transformer.h.0.attn.c_attn.weight", "transformer.ln_f.weight")
    if not layers or not any(name in tensors for name in (_WTE, _WPE, wanted[1], wanted[2])):
        raise InputError(f"{where}: no nanoGPT parameter names; found {three_of(n for n in tensors if n != _HEAD)}; "
                         f"expected names such as {', '.join(wanted)}")  # fmt: skip
    n_layer = declared.sizes.get("n_layer", max(layers) + 1)
    if max(layers) >= n_layer:
        raise InputError(f"{where}: n_layer is {n_layer} but the file holds layer {max(layers)}; correct model_args")
    n_embd = declared.sizes.get("n_embd", _dimension(tensors, _WTE, 1, where))
    if "n_head" not in declared.sizes:
        raise InputError(f"{where}: the number of heads is not in the file and shapes do not tell it; give --n-head")
    n_head = declared.sizes["n_head"]
    if n_embd % n_head:
        raise InputError(f"{where}: n_embd {n_embd} is not divisible by n_head {n_head}; correct the number of heads")
    names = [name for name in tensors if name.endswith(".bias") and name.startswith("transformer.")]
    return Sizes(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=declared.sizes.get("block_size", _dimension(tensors, _WPE, 0, where)),
        vocab_size=declared.sizes.get("vocab_size", _dimension(tensors, _WTE, 0, where)),
        linear_bias=declared.bias is True or any(re.search(r"\.(c_attn|c_proj|c_fc)\.bias$", name) for name in names),
        norm_bias=declared.bias is True or any(re.search(r"\.ln_[12f]\.bias$", name) for name in names),
    )


def expected_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the model applies, by name."""
    c = sizes.n_embd
    shapes: dict[str, tuple[int, ...]] = {_WTE: (sizes.vocab_size, c), _WPE: (sizes.block_size, c)}

    def norm(name: str) -> None:
        shapes[name + ".weight"] = (c,)
        if sizes.norm_bias:
            shapes[name + ".bias"] = (c,)

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[name + ".weight"] = (rows, columns)
        if sizes.linear_bias:
            shapes[name + ".bias"] = (rows,)

    for index in range(sizes.n_layer):
        prefix = f"transformer.h.{index}."
        norm(prefix + "ln_1")
        linear(prefix + "attn.c_attn", 3 * c, c)
        linear(prefix + "attn.c_proj", c, c)
        norm(prefix + "ln_2")
        linear(prefix + "mlp.c_fc", 4 * c, c)
        linear(prefix + "mlp.c_proj", c, 4 * c)
    norm("transformer.ln_f")
    shapes[_HEAD] = (sizes.vocab_size, c)
    return shapes


def check_tensors(
    tensors: Mapping[str, object], expected: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, torch.Tensor]:
    """Picks the expected tensors; refuses missing ones, values that are no floating tensor, and other shapes.

    Raises:
        InputError: the first violation, with the names.
    """
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise InputError(f"{where}: missing {three_of(missing)}; the file is incomplete or is not this model")
    picked: dict[str, torch.Tensor] = {}
    for name, shape in expected.items():
        value = tensors[name]
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{where}: {name} is {describe(value)}, not a plain tensor; dequantise or re-save it")
        if value.dtype not in _DTYPE_NAMES:
            raise InputError(f"{where}: {name} has dtype {str(value.dtype).removeprefix('torch.')}; "
                             "weights must be FP32, BF16 or FP16: dequantise first")  # fmt: skip
        if tuple(value.shape) != shape:
            found = tuple(value.shape)
            hint = " (transposed: Hugging Face Conv1D orientation?)" if found == shape[::-1] else ""
            raise InputError(f"{where}: {name} has shape {list(found)}, expected {list(shape)}{hint}; "
                             "weights are [out, in]")  # fmt: skip
        picked[name] = value
    return picked


def dtype_names(tensors: Mapping[str, torch.Tensor]) -> str:
    """Formats of the tensors, sorted and joined by "+"."""
    return "+".join(sorted({_DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()}))


def _is_causal_mask(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    if value.numel() <= 1:
        return True
    if value.dim() < 2 or value.shape[-1] != value.shape[-2] or value.numel() != value.shape[-1] ** 2:
        return False
    plane = value.reshape(value.shape[-2:])
    return bool(torch.equal(plane != 0, torch.ones_like(plane, dtype=torch.bool).tril())) and bool(
        ((plane == 0) | (plane == 1)).all()
    )


def _dimension(tensors: Mapping[str, object], name: str, axis: int, where: str) -> int:
    value = tensors.get(name)
    if value is None:
        raise InputError(f"{where}: missing {name}; the file is incomplete or is not this model")
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        raise InputError(f"{where}: {name} is not a matrix; the file is not a nanoGPT checkpoint")
    return int(value.shape[axis])
