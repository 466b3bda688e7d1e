"""What each torch function does under emulated CUDA autocast.

An operation that would compute something else than on a GPU, and is not emulated, is refused by name. Functions in no
list are watched while they run: one that turns out to consist of listed operations is refused too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bf16forensics.emulate import autocast_elementwise as elementwise
from bf16forensics.emulate import autocast_lists as lists
from bf16forensics.emulate import autocast_loss as loss
from bf16forensics.emulate import autocast_products as products
from bf16forensics.errors import InputError

Function = Callable[..., Any]
#: Computes a call: (function, arguments, keyword arguments).
Rule = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def rule_of(func: Function) -> Rule:
    """How a call of a torch function is computed."""
    return _RULES.get(func, _watched)


class _Watch(TorchDispatchMode):
    """Refuses a function that consists of operations which autocast would cast."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping imports the compiler, which takes seconds, and there is nothing to compile.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kernel = func.overloadpacket.__name__
        formats = {t.dtype for t in _tensors(args) if _eligible(t)}
        is_product = bool(formats) and kernel in lists.PRODUCT_KERNELS
        is_narrow = bool(formats - {torch.float32}) and kernel in lists.KERNELS_REFUSED_IF_NARROW
        if is_product or is_narrow:
            raise _refusal(self._name)
        return func(*args, **(kwargs or {}))


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == "cpu"
    )


def _tensors(arguments: Any) -> list[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    if isinstance(arguments, (tuple, list)):
        return [tensor for value in arguments for tensor in _tensors(value)]
    return []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_cast(part, dtype) for part in value)
    return value.to(dtype) if _eligible(value) else value


def _cast_all(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Arguments:
    return tuple(_cast(a, dtype) for a in args), {name: _cast(a, dtype) for name, a in kwargs.items()}


def _refusal(name: str) -> InputError:
    return InputError(f"amp-bf16 does not emulate {name} on these operands; use --activations fp32")


def _name_of(func: Function) -> str:
    return f"torch function {getattr(func, '__name__', repr(func))!r}"


def _plain(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _watched(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _Watch(_name_of(func)):
        return func(*args, **kwargs)


def _refuse(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _refusal(_name_of(func))


def _refuse_attention(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise InputError(
        "amp-bf16: scaled_dot_product_attention was called by the model itself, out of the capture's reach; "
        "use --activations fp32"
    )


def _refuse_banned(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise InputError("autocast refuses binary_cross_entropy; use binary_cross_entropy_with_logits in the model")


def _fp32(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _cast_all(args, kwargs, torch.float32)
    return func(*args, **kwargs)


def _cross_entropy(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = kwargs.get("input", args[0] if args else None)
    is_narrow = isinstance(logits, torch.Tensor) and _eligible(logits) and logits.dtype == torch.bfloat16
    return loss.cross_entropy(*args, **kwargs) if is_narrow else _fp32(func, args, kwargs)


def _fp32_unless_dtype(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in args):
        return _fp32(func, args, kwargs)
    return func(*args, **kwargs)


def _promoted(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wide = any(t.dtype == torch.float32 for t in _tensors((args, tuple(kwargs.values()))))
    args, kwargs = _cast_all(args, kwargs, torch.float32 if wide else torch.bfloat16)
    # FP32 operands give an FP32 product here: autocast is off inside a promoted operation.
    return func(*args, **kwargs) if wide else _watched(func, args, kwargs)


def _lower(emulation: Function, mirrored: bool = False) -> Rule:
    """Operands in BF16; `mirrored` swaps the two operands."""

    def rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.pop("out", None) is not None:
            raise _refusal(f"{_name_of(func)} with out=")
        args, kwargs = _cast_all(args, kwargs, torch.bfloat16)
        if any(t.dtype != torch.bfloat16 for t in _tensors((args, tuple(kwargs.values())))):
            # FP64 or integers: not autocast's business, and torch refuses a mixture.
            return func(*args, **kwargs)
        return emulation(*(args[::-1] if mirrored else args), **kwargs)

    return rule


def _on_bf16(emulation: Function) -> Rule:
    """An elementwise operation of one BF16 tensor."""

    def rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors((args, tuple(kwargs.values())))
        if len(tensors) == 1 and tensors[0].dtype == torch.bfloat16 and "out" not in kwargs:
            return emulation(*args, **kwargs)
        return func(*args, **kwargs)

    return rule


def _with_number(emulation: Function, formats: tuple[torch.dtype, ...], in_place: bool = False) -> Rule:
    """An elementwise operation where a number, or a factor `alpha`, meets tensors of the formats."""

    def rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors((args, tuple(kwargs.values())))
        one_format = len({t.dtype for t in tensors}) == 1 and tensors[0].dtype in formats
        has_number = len(tensors) == 1 or kwargs.get("alpha", 1) != 1
        if not (one_format and has_number) or kwargs.get("out") is not None or kwargs.get("rounding_mode") is not None:
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("out", "rounding_mode")}
        result = emulation(*args, **kwargs)
        return args[0].copy_(result) if in_place else result

    return rule


def _rules() -> dict[Function, Rule]:
    found: dict[Function, Rule] = {}

    def give(names: tuple[str, ...], rule: Rule) -> None:
        found.update((function, rule) for name in names for function in lists.functions_named(name))

    give(lists.LOWER_PRECISION, _refuse)
    give(("scaled_dot_product_attention", "_scaled_dot_product_flash_attention"), _refuse_attention)
    give(lists.BANNED, _refuse_banned)
    give((*lists.FP32, *lists.COMPOSED_FP32), _fp32)
    give((*lists.FP32_UNLESS_DTYPE, *lists.COMPOSED_FP32_UNLESS_DTYPE), _fp32_unless_dtype)
    give(("cross_entropy",), _cross_entropy)
    give(lists.PROMOTE, _promoted)
    for name in ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "linear", "einsum"):
        give((name,), _lower(getattr(products, name)))
    give(("__rmatmul__",), _lower(products.matmul, mirrored=True))
    for name in ("gelu", "erf", "tanh", "sigmoid"):
        give((name,), _on_bf16(getattr(elementwise, name)))
    bf16, both = (torch.bfloat16,), (torch.bfloat16, torch.float32)
    for emulation, formats, names in (
        (elementwise.add, bf16, ("add",)),
        (elementwise.sub, bf16, ("sub", "subtract")),
        (elementwise.rsub, bf16, ("rsub", "__rsub__")),
        (elementwise.div, both, ("div", "divide", "true_divide")),
    ):
        give(names, _with_number(emulation, formats))
        give(tuple(f"{name}_" for name in names), _with_number(emulation, formats, in_place=True))
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
        found[function] = _plain
    return found


_RULES = _rules()
