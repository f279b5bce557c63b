"""`__all__` of every public module: there, sorted, real and without private names."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "sdx_accel", ROOT / "kernels" / "sdx_kernels", ROOT / "patches" / "sdx_patches")


def public_modules() -> list[str]:
    """Every module with no private part in its name; those that need Triton are private."""
    names = []
    for source in SOURCES:
        names.append(source.name)
        for module in pkgutil.walk_packages([str(source)], f"{source.name}."):
            if not any(part.startswith("_") for part in module.name.split(".")):
                names.append(module.name)
    return names


def path_of(name: str) -> Path:
    root = next(source for source in SOURCES if source.name == name.split(".")[0])
    path = root.parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def kind_and_name(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff's RUF022 orders them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_the_walk_finds_the_packages() -> None:
    found = public_modules()
    assert {"sdx_accel.errors", "sdx_kernels.target", "sdx_patches.session"} <= set(found)


@pytest.mark.parametrize("name", public_modules())
def test_exports_are_sorted_and_real(name: str) -> None:
    tree = ast.parse(path_of(name).read_text(encoding="utf-8"))
    defines = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    if exported is None:
        # a docstring alone exports nothing; a module that defines something has to say what
        assert defines == [], f"{name} has no __all__"
        return
    assert list(exported) == sorted(exported, key=kind_and_name)
    assert len(set(exported)) == len(exported)
    assert [entry for entry in exported if not hasattr(module, entry)] == []


@pytest.mark.parametrize("name", public_modules())
def test_every_module_says_what_it_is(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(path_of(name).read_text(encoding="utf-8")))
    assert docstring, f"{name} has no docstring"
    assert docstring != "Set up by its owner."
