"""What a script on a GPU machine does before torch and the host are imported."""

from boot import ARGUMENTS, answer  # isort: split

import sys

from stand_ins import stand_in

STOOD_IN = stand_in()
DYNAMIC = ARGUMENTS.get("dynamic", False)
if DYNAMIC:
    import comfy_aimdo.control

    comfy_aimdo.control.init()
if ARGUMENTS.get("malloc", False):
    import cuda_malloc  # noqa: F401  sets the environment that torch reads

if not ARGUMENTS.get("cpu", True):
    import torch

    if not torch.cuda.is_available():
        answer(skipped="there is no GPU here; set cpu to true to try the script")
        sys.exit()
