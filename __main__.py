"""`python -m sixbit_diffusion`, and `python PATH_OF_THE_CHECKOUT`, which runs that checkout."""

import importlib.util
import sys
from pathlib import Path

NAME = "sixbit_diffusion"


def register_root(root: Path) -> None:
    """Make the checkout at `root` the one imported as `sixbit_diffusion`, whatever else is installed.

    Raises:
        RuntimeError: if `root` is no checkout, or another copy is imported already.
    """
    if NAME in sys.modules:
        found = Path(sys.modules[NAME].__file__ or "").resolve().parent
        if found != root.resolve():
            raise RuntimeError(f"the copy in {root} was wanted, and {found} is imported already: start anew")
        return
    spec = importlib.util.spec_from_file_location(
        NAME, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    if spec is None or spec.loader is None:
        raise RuntimeError(
            f"a checkout with an __init__.py was needed, got {root}: run from a whole checkout"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if not __package__:  # started by path: make the checkout importable under its name first
        register_root(Path(__file__).resolve().parent)
    from sixbit_diffusion.engine.cli import main

    sys.exit(main())
