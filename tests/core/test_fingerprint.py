import pytest
import torch
from safetensors.torch import save_file
from sixbit_diffusion.sixbit_core import checkpoint, safetensors_file
from sixbit_diffusion.sixbit_core.checkpoint import open_checkpoint
from sixbit_diffusion.sixbit_core.families import FAMILIES
from sixbit_diffusion.sixbit_core.fingerprint import fingerprint_tensors, sample_range
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint
from sixbit_diffusion.sixbit_core.safetensors_file import StreamWriter, read_bytes


def test_the_same_however_it_is_stored(tiny, store, native_state, tmp_path, way):
    model = tiny("5b-i2v")
    path = store(model, way)
    expected = fingerprint_tensors(native_state(model))
    assert len(expected) == 32 and int(expected, 16) >= 0
    assert open_checkpoint(path).fingerprint == expected
    target = tmp_path / "quantized.safetensors"
    quantize_checkpoint(path, target, QuantizeConfig(method="rtn"))
    assert open_checkpoint(target).fingerprint == expected


@pytest.mark.parametrize("name", ["blocks.0.q.weight", "blocks.1.ff_out.bias", "norm_final.weight"])
def test_other_weights_have_another(tiny, native_state, name):
    state = native_state(tiny())
    before = fingerprint_tensors(state)
    state[name] = state[name] * 1.25 + 0.01
    assert fingerprint_tensors(state) != before


def test_other_precision_has_another(tiny, native_state):
    state = native_state(tiny())
    half = {name: tensor.half() for name, tensor in state.items()}
    assert fingerprint_tensors(half) != fingerprint_tensors(state)


def test_a_position_table_added_by_a_loader_changes_nothing(tiny, native_state):
    state = native_state(tiny("2b"))
    before = fingerprint_tensors(state)
    state["patch_embed.pos_embedding"] = torch.ones(1, 3, 128)
    assert fingerprint_tensors(state) == before


def test_views_in_memory_count_as_their_values(tiny, native_state):
    state = native_state(tiny())
    turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in state.items()}
    assert fingerprint_tensors(turned) == fingerprint_tensors(state)


@pytest.mark.parametrize("nbytes", [0, 2, 6, 64, 66, 128, 1000, 10**9 + 2])
def test_sample_range_stays_inside(nbytes):
    start, stop = sample_range(nbytes)
    assert 0 <= start <= stop <= nbytes and start % 8 == 0
    assert stop - start >= min(nbytes, 57)


def test_metadata_of_a_plain_file_is_not_believed(tiny, native_state, tmp_path):
    state = native_state(tiny())
    save_file(state, tmp_path / "a.safetensors", {"sixbit_fingerprint": "0" * 32})
    assert open_checkpoint(tmp_path / "a.safetensors").fingerprint == fingerprint_tensors(state)


def test_64_bytes_a_tensor_are_read_of_a_5b(tmp_path, monkeypatch):
    """A sparse file of the 5B's size, 11 GB: what is read is what takes time."""
    shapes = FAMILIES["cogvideox-5b"].tensor_shapes()
    path = tmp_path / "5b.safetensors"
    writer = StreamWriter(path, [(n, torch.bfloat16, s) for n, s in shapes.items()], {})
    with open(path, "wb") as file:
        file.write(len(writer._header).to_bytes(8, "little") + writer._header)
        file.truncate(writer.nbytes)
    read = []

    def counted(info, start=0, stop=None):
        data = read_bytes(info, start, stop)
        read.append(len(data))
        return data

    for module in (checkpoint, safetensors_file):
        monkeypatch.setattr(module, "read_bytes", counted)
    assert len(open_checkpoint(path).fingerprint) == 32
    assert len(read) == len(shapes) and max(read) == 64
