"""`python -m sixbit_diffusion`, and `python PATH_OF_THE_CHECKOUT`, which runs that checkout."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # started by path: make the checkout importable under its name first
        root = Path(__file__).resolve().parent
        runpy.run_path(str(root / "reference" / "launch.py"))["register_root"](root)
    from sixbit_diffusion.engine.cli import main

    sys.exit(main())
