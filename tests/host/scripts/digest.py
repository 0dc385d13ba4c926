"""One run in a process of its own."""

from boot import answer  # isort: split

import torch
from graph import digest

with torch.inference_mode():
    answer(digest=digest())
