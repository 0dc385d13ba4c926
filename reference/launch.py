"""Runs the trainer from a plain checkout: `python reference/launch.py STAGE ...`, nothing to install.

The pack is imported by path, under the name `sixbit_diffusion`, as its tests do.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
register_root = runpy.run_path(str(ROOT / "__main__.py"))["register_root"]

if __name__ == "__main__":
    register_root(ROOT)
    from sixbit_diffusion.reference.train import main

    sys.exit(main())
