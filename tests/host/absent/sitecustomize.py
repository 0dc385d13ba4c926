"""In a server's PYTHONPATH: Triton and diffusers are as if not installed."""

import sys

ABSENT = ("triton", "diffusers")


class _Blocker:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _Blocker())
