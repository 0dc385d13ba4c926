"""Tests on a real ComfyUI, each in that host's own Python; skipped with one line where there is none."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # the tests of this folder share modules

from comfy_server import Host, host_or_skip


@pytest.fixture(scope="session")
def host() -> Host:
    return host_or_skip()
