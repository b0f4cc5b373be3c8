"""The shape of the code is tested like its behaviour: who imports whom, what a wheel holds, how large pieces get."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
PACKAGES = ("ckptd", "client/ckptd_client", "backends/ckptd_backends")
OUTSIDE = ("devtools", "examples", "bench", "tests")

LINES_MAX = 500
LINES_USUAL = 300
FUNCTION_LINES_MAX = 70
LONGER_THAN_USUAL = {
    "backends/ckptd_backends/testing.py": "the conformance suite is read as one list of promises",
    "client/ckptd_client/checkpointer.py": "the one class of the API, and half of it is its contracts",
    "client/ckptd_client/capture/state.py": "how the whole state is captured and restored stands side by side",
    "client/ckptd_client/capture/module.py": "how a module is walked, named and loaded has to be read together",
    "ckptd/daemon/commit.py": "a commit is one story, from the receipts to the manifest",
    "ckptd/daemon/link.py": "how a tier is led and how it is followed stands side by side",
    "ckptd/wire/messages.py": "all messages stand side by side",
    "ckptd/format/records.py": "the records of the format stand side by side, as in its specification",
}
"""Module → why it is one piece although it has more than 300 lines."""

FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "handler", "handlers", "common", "misc"}
HEAVY = ("torch", "numpy", "boto3", "botocore", "fsspec", "crc32c")


def _modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_import_contracts_hold() -> None:
    done = _run(Path(sysconfig.get_path("scripts")) / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_core_and_daemon_import_nothing_heavy() -> None:
    modules = [
        _name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in _modules("ckptd")
        if path.name != "__main__.py"
    ]
    assert "ckptd.daemon" in modules
    assert "ckptd.cli" in modules
    program = f"import sys, {', '.join(modules)}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    done = _run(sys.executable, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_wheel_holds_the_three_packages_only(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"ckptd", "ckptd_client", "ckptd_backends"}
    assert {f"{package}/py.typed" for package in top} <= set(names)


@pytest.mark.parametrize("folder", ["client", "backends"])
def test_source_folders_are_not_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_files_are_small() -> None:
    sizes = {_name(path): len(path.read_text().splitlines()) for path in _modules(*PACKAGES, *OUTSIDE)}
    assert [name for name, lines in sizes.items() if lines > LINES_MAX] == []
    shipped = tuple(f"{package}/" for package in PACKAGES)
    long = {name for name, lines in sizes.items() if lines > LINES_USUAL and name.startswith(shipped)}
    assert long == set(LONGER_THAN_USUAL), "say in LONGER_THAN_USUAL why a module is long, and drop what no longer is"


def test_functions_are_small() -> None:
    """Their bodies: what a command or a constructor takes is a table, and may be long."""
    long = [
        f"{_name(path)}: {node.name}"
        for path in _modules(*PACKAGES, "devtools")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_modules_are_named_for_what_they_do() -> None:
    assert [_name(path) for path in _modules(*PACKAGES, "devtools") if path.stem in FORBIDDEN_NAMES] == []


def test_what_is_public_says_what_it_is() -> None:
    silent = [
        _name(path) if isinstance(node, ast.Module) else f"{_name(path)}: {node.name}"
        for path in _modules(*PACKAGES, "devtools")
        for node in (_tree(path), *_tree(path).body)
        if isinstance(node, ast.Module)
        or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"))
        if not ast.get_docstring(node) and "overload" not in _decorators(node)
    ]
    assert silent == []


def _decorators(node: ast.AST) -> set[str]:
    return {ast.unparse(decorator).split(".")[-1] for decorator in getattr(node, "decorator_list", ())}


def test_the_local_backend_touches_files_through_its_seam_only() -> None:
    modules = sorted((ROOT / "backends" / "ckptd_backends").glob("local*.py"))
    assert len(modules) > 4
    assert [found for path in modules for found in _file_access(path)] == []


COMPUTED = {"basename", "dirname", "join", "relpath"}
"""What of ``os.path`` looks at no file."""


def _file_access(path: Path) -> Iterator[str]:
    """Whatever reaches the operating system's files but by :mod:`ckptd_backends.files`."""
    reaching = {"aiofiles", "ctypes", "fcntl", "glob", "io", "mmap", "shutil", "tempfile"}
    for node in ast.walk(_tree(path)):
        match node:
            case ast.Import(names=names) if reaching & {alias.name.split(".")[0] for alias in names}:
                yield f"{_name(path)}: {ast.unparse(node)}"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in {*reaching, "os"}:
                yield f"{_name(path)}: {ast.unparse(node)}"
            case ast.Call(func=ast.Name(id="open" | "Path" | "__import__")):
                yield f"{_name(path)}: {ast.unparse(node)}"
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name != "path":
                yield f"{_name(path)}: os.{name}"
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="os")), attr=name) if name not in COMPUTED:
                yield f"{_name(path)}: os.path.{name}"
            case _:
                pass


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos.open(path, 0)",
        "import os\nos.path.realpath(path)",
        "import os\nwith os.scandir(path): pass",
        "from os import unlink",
        "from pathlib import Path\nPath(path).read_text()",
        "import shutil",
        "open(path)",
    ],
)
def test_the_seam_scan_sees_what_it_looks_for(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(_file_access(_module_of(line, tmp_path, monkeypatch)))


def _module_of(line: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of this source alone, in a project of its own."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", root)
    module = root / "module.py"
    module.write_text(line)
    return module


def test_nothing_executes_what_was_read() -> None:
    assert [found for path in _modules(*PACKAGES) for found in _unsafe(path)] == []


def _unsafe(path: Path) -> Iterator[str]:
    """Pickle in any of its disguises, unsafe loads, and evaluation of text."""
    picklers = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for node in ast.walk(_tree(path)):
        match node:
            case ast.Import(names=names) if picklers & {alias.name.split(".")[0] for alias in names}:
                yield f"{_name(path)}: {ast.unparse(node)}"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in picklers:
                yield f"{_name(path)}: {ast.unparse(node)}"
            case ast.Call(func=ast.Name(id="eval" | "exec")):
                yield f"{_name(path)}: {ast.unparse(node)}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                yield f"{_name(path)}: {ast.unparse(node)}"
            case ast.keyword(arg="weights_only" | "allow_pickle", value=ast.Constant(value=value)) if value is not (
                node.arg == "weights_only"
            ):
                yield f"{_name(path)}: {ast.unparse(node)}"
            case _:
                pass


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_scan_sees_what_it_looks_for(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(_unsafe(_module_of(line, tmp_path, monkeypatch)))
