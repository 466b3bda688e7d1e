"""The rooms, read from the syntax trees: who may import whom, and who may import torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bf16forensics"
KERNELS = ROOT / "kernels"

#: Left to right: a room imports itself and the rooms before it.
ROOMS = (
    "floats",
    "recipe",
    "emulate",
    "geometry",
    "load",
    "capture",
    "attention",
    "evidence",
    "investigate",
    "verdict",
    "report",
    "demo",
    "commands",
)
#: Modules at the top of the package that every room may import; `bf16forensics` itself holds the version.
GROUND = ("bf16forensics", "bf16forensics.errors")
WITHOUT_TORCH = ("floats", "recipe", "verdict", "report")
#: Modules of those rooms that handle tensor files: the writer of a case's tensors, and (without torch) that of arrays.
TORCH_ALLOWED = ("bf16forensics.report.array_file", "bf16forensics.report.case", "bf16forensics.report.tensors")
WITHOUT_NUMPY = ("recipe", "verdict")
#: The only modules that may import kernels; all of them in the attention room.
GATEWAYS = (
    "fused",
    "fused_inputs",
    "fused_recipe",
    "fused_rows",
    "fused_ties",
    "kernel_rounding",
    "matrix_unit",
    "token_products",
)

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "data" not in path.relative_to(PACKAGE).parts)
KERNEL_MODULES = sorted(KERNELS.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.lineno, node.module
            if node.module.split(".")[0] == "bf16forensics":
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] == "bf16forensics" and len(parts) > 1 and parts[1] in (*ROOMS, "kernels"):
            yield line, parts[1]


def top_names(path: Path) -> set[str]:
    return {name.split(".")[0] for _, name in imports(path)}


def room_of(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def test_every_directory_is_a_known_room() -> None:
    found = {path.relative_to(PACKAGE).parts[0] for path in MODULES if room_of(path) is not None}
    assert found <= set(ROOMS)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_only_rooms_to_its_left(path: Path) -> None:
    room = room_of(path)
    if room is None:
        allowed = set(ROOMS) if path.name in ("cli.py", "__main__.py") else set()
    else:
        allowed = set(ROOMS[: ROOMS.index(room) + 1])
    if room == "attention" and path.stem in GATEWAYS:
        allowed.add("kernels")
    wrong = [f"line {line}: {name}" for line, name in imported_rooms(path) if name not in allowed]
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_nothing_else_of_the_package(path: Path) -> None:
    if room_of(path) is None:
        return
    known = {module_name(module) for module in MODULES}
    for line, name in imports(path):
        if name in known and name.split(".")[0] == "bf16forensics" and name.count(".") == 1:
            is_room = name.split(".")[1] in ROOMS
            assert is_room or name in GROUND, f"line {line}: {name}"


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) in WITHOUT_TORCH], ids=module_name)
def test_rooms_without_torch(path: Path) -> None:
    if module_name(path) not in TORCH_ALLOWED:
        assert top_names(path).isdisjoint({"torch", "triton", "safetensors"})


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) in WITHOUT_NUMPY], ids=module_name)
def test_rooms_without_numpy(path: Path) -> None:
    assert "numpy" not in top_names(path)


@pytest.mark.parametrize("path", [*MODULES, *KERNEL_MODULES], ids=module_name)
def test_nothing_imports_kernels_by_its_bare_name(path: Path) -> None:
    assert "kernels" not in top_names(path)


@pytest.mark.parametrize("path", KERNEL_MODULES, ids=module_name)
def test_kernels_import_only_kernels(path: Path) -> None:
    wrong = [name for _, name in imports(path) if name.split(".")[0] == "bf16forensics"]
    assert [name for name in wrong if not name.startswith("bf16forensics.kernels")] == []


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py" and room_of(path) is not None], ids=module_name
)
def test_a_room_init_is_a_docstring(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)
    assert isinstance(body[0].value.value, str)


@pytest.mark.parametrize("text", ["import kernels", "from kernels import rounding", "import kernels.rounding"])
def test_the_reader_of_imports_sees_a_bare_import(text: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(f"def late():\n    {text}\n", encoding="utf-8")
    assert "kernels" in top_names(module)


def test_the_reader_of_imports_sees_rooms_imported_from_the_package(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("from bf16forensics import report\nimport bf16forensics.kernels.rounding\n", encoding="utf-8")
    assert [room for _, room in imported_rooms(module)] == ["report", "kernels"]
