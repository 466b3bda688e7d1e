"""A pickle reader that rebuilds data and nothing else.

Everything that a pickle can name comes from the closed tables of this module. What it gets for a name is inert: calling
it, building on it or appending to it makes data objects and runs no code of the file's choosing. A name outside the
tables ends the reading with an error that says the name.
"""

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from bf16forensics.errors import InputError
from bf16forensics.load import inert
from bf16forensics.load.inert import StorageKind, StorageRef, placeholder_type

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
    "QInt8Storage": torch.qint8, "QUInt8Storage": torch.quint8, "QInt32Storage": torch.qint32,
}  # fmt: skip
_NUMPY_TYPES = frozenset(
    "ndarray bool bool_ str_ bytes_ float16 float32 float64 longdouble int8 int16 int32 int64 uint8 uint16 uint32 "
    "uint64 complex64 complex128".split()
)
_PATHS = frozenset({"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"})
#: Types whose objects become placeholders: data types of common training extras, each by its full name.
_HARMLESS: dict[str, frozenset[str]] = {
    "argparse": frozenset({"Namespace"}),
    "types": frozenset({"SimpleNamespace"}),
    "pathlib": _PATHS, "pathlib._local": _PATHS,
    "datetime": frozenset({"datetime", "date", "time", "timedelta", "timezone"}),
    "collections": frozenset({"deque"}),
    "decimal": frozenset({"Decimal"}), "fractions": frozenset({"Fraction"}), "uuid": frozenset({"UUID"}),
    "typing": frozenset({"Any"}),
    "numpy": _NUMPY_TYPES,
    "numpy.core.multiarray": frozenset({"_reconstruct"}), "numpy._core.multiarray": frozenset({"_reconstruct"}),
    "omegaconf.dictconfig": frozenset({"DictConfig"}), "omegaconf.listconfig": frozenset({"ListConfig"}),
    "omegaconf.base": frozenset({"ContainerMetadata", "Metadata"}),
    "omegaconf.nodes": frozenset({"AnyNode", "IntegerNode", "FloatNode", "StringNode", "BooleanNode"}),
    "torch": frozenset({"device", "Generator"}),
    "torch.torch_version": frozenset({"TorchVersion"}),
    "torch.amp.grad_scaler": frozenset({"GradScaler"}), "torch.cuda.amp.grad_scaler": frozenset({"GradScaler"}),
    "torch._utils": frozenset({"_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_nested_tensor",
                               "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass",
                               "_rebuild_device_tensor_from_numpy"}),
    "torch.serialization": frozenset({"_get_layout"}),
}  # fmt: skip
#: Built-in types that are no news when they become placeholders (default factories and the like).
_SILENT = frozenset(
    {"list", "dict", "tuple", "int", "float", "bool", "str", "bytes", "bytearray", "object", "slice", "range"}
)


_BUILDERS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch._utils", "_rebuild_tensor"): inert.make_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): inert.make_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): inert.make_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    ("torch._tensor", "_rebuild_from_type_v2"): inert.make_from_type,
    ("torch", "Tensor"): lambda *_: None,
    ("torch.nn.parameter", "Parameter"): lambda data=None, *_: data,
    ("torch", "Size"): lambda items=(): tuple(items),
    ("collections", "OrderedDict"): inert.make_mapping,
    ("collections", "defaultdict"): lambda *args: inert.make_mapping(*args[1:]),
    ("collections", "Counter"): inert.make_mapping,
    ("builtins", "set"): lambda items=(): set(items),
    ("builtins", "frozenset"): lambda items=(): frozenset(items),
    ("builtins", "complex"): lambda real, imaginary=0.0: complex(real, imaginary),
    ("numpy", "dtype"): inert.make_numpy_dtype,
    ("numpy.core.multiarray", "scalar"): inert.make_numpy_scalar,
    ("numpy._core.multiarray", "scalar"): inert.make_numpy_scalar,
    ("_codecs", "encode"): inert.encode,
    ("copyreg", "_reconstructor"): inert.reconstruct,
}


class PickleStream(Protocol):
    """What the reader needs of a stream; an `mmap` has it."""

    def read(self, n: int = -1, /) -> bytes:
        """At most n bytes."""

    def readline(self) -> bytes:
        """Up to and with the next newline."""


def _refuse_opcode(reader: object) -> None:
    raise pickle.UnpicklingError("an opcode that reserves memory before it reads")


# The reader in Python, not the one in C: a single damaged index makes that one reserve gigabytes for its memo.
class RestrictedUnpickler(pickle._Unpickler):
    """Reads one pickle into dicts, lists, tuples, sets, numbers, strings, `TensorRef` and `Placeholder`."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: _refuse_opcode,
    }

    def __init__(self, stream: PickleStream, where: str) -> None:
        """Prepares to read `stream`; `where` is the file to name in errors."""
        super().__init__(stream)
        self._where = where
        #: Full names of the types that became placeholders, in order of first appearance.
        self.blocked: list[str] = []
        #: dtype of every storage that the pickle names, by key.
        self.storages: dict[str, torch.dtype] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The inert stand-in for one global of the pickle.

        Raises:
            InputError: the global is in no table.
        """
        # Protocol 2, which torch writes, has the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGES:
            return StorageKind(_STORAGES[name])
        # Not getattr: torch imports some of its modules when they are asked for.
        if module == "torch" and isinstance(constant := vars(torch).get(name), torch.dtype | torch.qscheme):
            return constant
        if (module, name) in _BUILDERS:
            return inert.Inert(_BUILDERS[module, name])
        if module == "builtins" and name in _SILENT:
            return placeholder_type(f"{module}.{name}")
        # An optimiser or scheduler object: every class there is data to us, whatever its module is called.
        optimiser = module.startswith("torch.optim.") and name.isidentifier() and name[:1].isupper()
        if optimiser or name in _HARMLESS.get(module, ()):
            dotted = f"{module}.{name}"
            if dotted not in self.blocked:
                self.blocked.append(dotted)
            return placeholder_type(dotted)
        raise InputError(
            f"{self._where}: refers to {module}.{name}, which is not plain data; nothing was executed. "
            "Re-save the state dict and plain settings alone, without that object"
        )

    def persistent_load(self, pid: Any) -> object:
        """A reference to a storage.

        Raises:
            UnpicklingError: not a storage reference.
        """
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise pickle.UnpicklingError("unknown persistent id")
        kind, key, _, count = pid[1:5]
        view = pid[5] if len(pid) == 6 else None
        if not isinstance(kind, StorageKind) or not isinstance(count, int) or count < 0:
            raise pickle.UnpicklingError("malformed storage reference")
        offset = view[1] if isinstance(view, tuple) and len(view) == 3 and isinstance(view[1], int) else 0
        self.storages[str(key)] = kind.dtype
        return StorageRef(key=str(key), dtype=kind.dtype, num_elements=count, view_offset=offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpickled:
    """One pickle, read."""

    #: dicts, lists, tuples, sets, numbers, strings, `TensorRef` and `Placeholder`.
    tree: object
    #: Full names of the types that became placeholders, in order of first appearance.
    blocked: tuple[str, ...]
    #: dtype of every storage that the pickle names, by key.
    storages: Mapping[str, torch.dtype]


def load_pickle(stream: PickleStream, where: str) -> Unpickled:
    """Reads one pickle from the stream's position and leaves the stream behind its end.

    Args:
        stream: positioned at the pickle.
        where: file to name in errors.

    Raises:
        InputError: damaged, or a name that is not data.
    """
    reader = RestrictedUnpickler(stream, where)
    try:
        tree = reader.load()
    except InputError:
        raise
    except EOFError as error:
        raise InputError(f"{where}: truncated; its object tree ends early. Copy or download it again") from error
    # A hostile pickle can raise nearly anything from the interpreter of its opcodes.
    except Exception as error:
        raise InputError(f"{where}: not a checkpoint or damaged (its object tree cannot be read)") from error
    return Unpickled(tree=tree, blocked=tuple(reader.blocked), storages=reader.storages)
