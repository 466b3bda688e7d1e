"""What a pickle gets for the names in it: objects that hold data and run no code of the file's choosing."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

_NUMPY_SCALARS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRef:
    """A storage named by the pickle; its bytes lie elsewhere in the file."""

    #: Key of the storage in the container.
    key: str
    dtype: torch.dtype
    #: Elements of the whole storage.
    num_elements: int
    #: First element of the part meant (legacy format only).
    view_offset: int = 0

    # Keeps a pickle from changing the fields after they were checked.
    def __setstate__(self, state: object) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A tensor named by the pickle: a strided window on a storage. Strides and offset count elements of `dtype`."""

    storage: StorageRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    # Keeps a pickle from changing the fields after they were checked.
    def __setstate__(self, state: object) -> None:
        """Does nothing."""


class _PlaceholderType(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("placeholders take no attributes")


class Placeholder(metaclass=_PlaceholderType):
    """Stands for an object of a harmless type that is not rebuilt; every operation of a pickle on it does nothing."""

    __slots__ = ("state",)
    #: Module and name of the type it stands for.
    dotted_name = ""

    state: dict[Any, Any] | None

    def __new__(cls, *args: object, **kwargs: object) -> "Placeholder":
        """Takes any arguments and drops them."""
        made = super().__new__(cls)
        made.state = None
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Does nothing."""

    # Reached with one argument when a pickle builds on the class instead of on an instance.
    def __setstate__(*args: object) -> None:
        """Keeps the state of an instance where it is a dict."""
        if len(args) == 2 and isinstance(args[0], Placeholder) and isinstance(args[1], dict):
            args[0].state = args[1]

    def append(self, *args: object) -> None:
        """Does nothing."""

    extend = add = __setitem__ = append


class Inert:
    """Base of what a pickle gets for a name: calling it makes data, building on it does nothing."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., object]) -> None:
        self._make = make

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._make(*args, **kwargs)

    def __setstate__(self, state: object) -> None:
        pass


class InertMapping(dict[Any, Any]):
    """Every mapping type of the file; attributes of the mapping are dropped."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class StorageKind(Inert):
    """A storage class of torch; only its dtype matters."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(lambda *args: None)
        self.dtype = dtype


class NumpyDtype:
    """A NumPy scalar type and its byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "<"

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = "<" if state[1] in "|=" else state[1]


def placeholder_type(dotted: str) -> type[Placeholder]:
    """A placeholder class for one type, by its full name."""
    members = {"__slots__": (), "dotted_name": dotted}
    return cast(type[Placeholder], _PlaceholderType("Placeholder", (Placeholder,), members))


def make_tensor(storage: object, offset: object, size: object, stride: object, *rest: object) -> TensorRef:
    """A tensor reference from the arguments of torch's rebuild functions, versions 1 to 3."""
    # Version 3 of the format names the dtype because its storages have none.
    dtype = next((item for item in rest if isinstance(item, torch.dtype)), None)
    if not isinstance(storage, StorageRef) or not isinstance(offset, int) or offset < 0:
        raise pickle.UnpicklingError("malformed tensor")
    if not isinstance(size, tuple) or not isinstance(stride, tuple) or len(size) != len(stride):
        raise pickle.UnpicklingError("malformed tensor")
    if not all(isinstance(number, int) and number >= 0 for number in size + stride):
        raise pickle.UnpicklingError("malformed tensor")
    return TensorRef(storage=storage, dtype=dtype or storage.dtype, offset=offset, size=size, stride=stride)


def make_from_type(make: object, _type: object, args: object, _state: object = None) -> object:
    """A tensor that was saved with its Python type or attributes; both are dropped."""
    if not isinstance(make, Inert) or not isinstance(args, tuple):
        raise pickle.UnpicklingError("malformed tensor")
    return make(*args)


def make_mapping(*args: object) -> InertMapping:
    """A mapping from nothing, a mapping, or pairs."""
    items = args[-1] if args and isinstance(args[-1], dict | list | tuple) else ()
    return InertMapping(items)


def make_numpy_dtype(code: object, *_: object) -> object:
    """A NumPy dtype: a plain scalar one is kept, any other becomes a placeholder."""
    return NumpyDtype(code) if isinstance(code, str) and code in _NUMPY_SCALARS else placeholder_type("numpy.dtype")()


def make_numpy_scalar(dtype: object, data: object = b"") -> object:
    """The Python number of a NumPy scalar; a placeholder where it is not a plain number."""
    if not isinstance(dtype, NumpyDtype) or not isinstance(data, bytes):
        return placeholder_type("numpy.generic")()
    return np.frombuffer(data, dtype=np.dtype(dtype.order + dtype.code), count=1)[0].item()


def encode(text: object, encoding: object = "utf-8") -> bytes:
    """Bytes that a protocol 2 pickle stores as text."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise pickle.UnpicklingError("unexpected encoding")
    return text.encode(str(encoding))


def reconstruct(cls: object, *_: object) -> object:
    """The object of an old-style class, as a placeholder."""
    if not isinstance(cls, _PlaceholderType):
        raise pickle.UnpicklingError("unexpected base object")
    return cls()
