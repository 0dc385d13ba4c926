"""Imports go one way: nodes -> sixbit_core -> kernels. Only nodes may know ComfyUI, only engine diffusers."""

import ast
from pathlib import Path

import pytest
from sixbit_diffusion.nodes.host_contract import PARTS_SEAMS, SEAMS, TEXT_SEAMS

ROOT = Path(__file__).resolve().parents[1]
COMFY = {"comfy", "comfy_api", "comfy_extras", "folder_paths", "node_helpers"}
ENGINE = {"engine", "reference", "diffusers", "transformers"}
FORBIDDEN = {
    "kernels": {"sixbit_core", "nodes"} | ENGINE | COMFY,
    "sixbit_core": {"nodes", "triton"} | ENGINE | COMFY,
    "engine": {"nodes", "triton"} | COMFY,
    "nodes": {"triton"} | ENGINE,
    "reference": {"nodes", "triton", "kernels"} | COMFY,
}


def imported_names(path: Path) -> set[str]:
    """Names of absolute imports, and what relative ones reach outside the module's own top-level package."""
    inside = len(path.relative_to(ROOT).parts) - 1  # dots that stay within kernels/, nodes/, ...
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not 0 < node.level <= inside:
            names |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_go_one_way(layer):
    files = list((ROOT / layer).rglob("*.py"))
    assert files, f"no modules in {layer}/"
    for path in files:
        assert not imported_names(path) & FORBIDDEN[layer], path


def test_triton_stays_in_twins():
    for layer in ("kernels", "sixbit_core", "engine", "reference"):
        for path in (ROOT / layer).rglob("*.py"):
            if not path.name.endswith("_triton.py"):
                top = ast.parse(path.read_text(encoding="utf-8")).body
                names = {a.name.split(".")[0] for n in top if isinstance(n, ast.Import) for a in n.names}
                assert "triton" not in names, path


RUNS_CODE = {"eval", "exec", "compile", "__import__"}  # builtins; `model.eval()` and `re.compile` are others
UNPICKLES = {f"{owner}.{call}" for owner in ("torch", "np", "numpy") for call in ("load", "save")}
UNPICKLERS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def sources() -> list[Path]:
    """Every module but tests."""
    inside = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    return [
        p for p in inside if not p.parts[0].startswith(".") and p.parts[0] not in {"tests", "build", "out"}
    ]


def test_no_file_can_run_code() -> None:
    """safetensors and JSON only: nothing unpickles, nothing evaluates."""
    assert len(sources()) > 100
    for path in sources():
        assert not imported_names(ROOT / path) & UNPICKLERS, path
        calls = [
            n.func for n in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))) if isinstance(n, ast.Call)
        ]
        for call in map(ast.unparse, calls):
            assert call not in RUNS_CODE | UNPICKLES, (path, call)


def test_no_top_level_leaks() -> None:
    for path in sources():
        source = (ROOT / path).read_text(encoding="utf-8")
        assert "sys.path.insert" not in source and "sys.path.append" not in source, path


def test_no_helper_of_the_host_tests_is_named_like_a_module_of_the_host():
    """They are imported by bare names, and the nodes look modules of the host up in sys.modules."""
    helpers = {path.stem for path in (ROOT / "tests" / "host").glob("*.py")}
    assert not helpers & ({seam.module.split(".")[0] for seam in SEAMS + PARTS_SEAMS + TEXT_SEAMS} | COMFY)
