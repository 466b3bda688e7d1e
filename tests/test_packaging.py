"""The package as it ships: declared packages, the wheel's content, and the tool run from it elsewhere."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bf16forensics

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


def test_declared_packages_are_the_directories_with_python_files() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "bf16forensics").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    found |= {
        ".".join(("bf16forensics", *path.parent.relative_to(ROOT).parts)) for path in (ROOT / "kernels").rglob("*.py")
    }
    declared = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(declared) == declared
    assert set(declared) == found


def test_every_package_has_an_init() -> None:
    mapping = PYPROJECT["tool"]["setuptools"]["package-dir"]
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        directory = ROOT / mapping.get(package, package.replace(".", "/"))
        assert (directory / "__init__.py").is_file(), package


def test_constraints_lie_within_the_declared_ranges() -> None:
    from packaging.requirements import Requirement

    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonical(name)] = version
    project = PYPROJECT["project"]
    declared = project["dependencies"] + [text for extra in project["optional-dependencies"].values() for text in extra]
    for requirement in map(Requirement, declared):
        assert canonical(requirement.name) in pins, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), requirement


def test_what_the_package_imports_is_declared() -> None:
    imported = set()
    for path in [*(ROOT / "bf16forensics").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    extras = PYPROJECT["project"]["optional-dependencies"]
    needed = PYPROJECT["project"]["dependencies"] + extras["gpu"] + extras["plot"]
    declared = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in needed}
    assert imported - set(sys.stdlib_module_names) - {"bf16forensics"} <= declared


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the build leaves nothing in the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("bf16forensics", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=IGNORED)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_wheel_holds_exactly_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for top, prefix in (("bf16forensics", "bf16forensics"), ("kernels", "bf16forensics/kernels")):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md":
                expected.add(f"{prefix}/{path.relative_to(ROOT / top).as_posix()}")
    assert names == expected
    assert "bf16forensics/py.typed" in names
    assert "bf16forensics/kernels/__init__.py" in names


def test_wheel_is_named_after_the_version(wheel: Path) -> None:
    assert wheel.name == f"bf16forensics-{bf16forensics.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "bf16forensics = bf16forensics.__main__:main" in archive.read(entry_points).decode()
        assert any(name.endswith("licenses/LICENSE") for name in names)


def test_unpacked_wheel_runs_elsewhere(wheel: Path, tmp_path: Path, run_python: Callable[..., Any]) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {"PYTHONPATH": str(site)}
    where = run_python(["-c", "import bf16forensics.kernels as k; print(k.__file__)"], env=env)
    assert Path(where.stdout.strip()) == site / "bf16forensics" / "kernels" / "__init__.py"
    listed = run_python(["-m", "bf16forensics", "recipe", "list"], env=env)
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert listed.stdout.startswith("fa2 (version")
