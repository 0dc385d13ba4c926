"""Files of the 2B's and the 5B's size are converted in at most 2 and 4 GB of resident memory.

Needs 5 and 15 GB of disk.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sixbit_diffusion.sixbit_core.families import FAMILIES
from sixbit_diffusion.sixbit_core.safetensors_file import StreamWriter

ROOT = Path(__file__).resolve().parents[2]
CONVERT = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
import conftest
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
summary = quantize_checkpoint(sys.argv[2], sys.argv[3], QuantizeConfig())
print(json.dumps({
    "seconds": round(summary.seconds, 1),
    "cpu_seconds": round(time.process_time(), 1),
    "gb_before": round(before * 1024 / 1e9, 2),
    "gb_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    "source_gb": round(summary.source_bytes / 1e9, 2),
    "target_gb": round(summary.target_bytes / 1e9, 2),
}))
"""


def write_random(path: Path, family: str, dtype: torch.dtype) -> None:
    shapes = FAMILIES[family].tensor_shapes()
    pool = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    with StreamWriter(path, [(n, dtype, s) for n, s in shapes.items()], {}) as writer:
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            writer.write(name, pool.repeat(-(-count // len(pool)))[:count].reshape(shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "gigabytes"),
    [("cogvideox-2b", torch.float16, 2.0), ("cogvideox-5b", torch.bfloat16, 4.0)],
)
def test_memory(tmp_path, family, dtype, gigabytes):
    source, target = tmp_path / "source.safetensors", tmp_path / "q.safetensors"
    write_random(source, family, dtype)
    command = [sys.executable, "-c", CONVERT, str(ROOT / "tests"), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    print(measured)
    assert measured["gb_peak"] <= gigabytes
    assert measured["source_gb"] / measured["target_gb"] > 3.4
    source.unlink()
    target.unlink()
