import pytest
import torch
from sixbit_diffusion.sixbit_core.families import FAMILIES, find_family, to_native
from sixbit_diffusion.sixbit_core.families.cogvideox import PUBLISHED


def meta_shapes(config):
    models = pytest.importorskip("diffusers.models.transformers.cogvideox_transformer_3d")
    with torch.device("meta"):
        model = models.CogVideoXTransformer3DModel(**config)
    return {to_native(name): tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("family", PUBLISHED, ids=lambda f: f.name)
def test_a_published_model_is_found_by_its_tensors(family):
    shapes = meta_shapes(family.diffusers_config({"blocks.0.q.bias": ()}))
    assert find_family(shapes) is family
    assert family.diffusers_config(shapes)["attention_bias"] is True
    needed, optional = family.tensor_shapes(), family.optional_shapes()
    assert set(needed) <= set(shapes) <= set(needed) | set(optional)
    for name, shape in shapes.items():
        wanted = {**optional, **needed}[name]
        assert all(w in (-1, n) for n, w in zip(shape, wanted, strict=True)), name


def test_names_are_those_saved_files_hold():
    assert set(FAMILIES) == {
        "cogvideox-2b",
        "cogvideox-5b",
        "cogvideox-5b-i2v",
        "cogvideox-1.5-5b",
        "cogvideox-1.5-5b-i2v",
        "cogvideox-small",
    }


def test_a_small_model_is_described_by_its_tensors(tiny, kind, native_state):
    model = tiny(kind)
    shapes = {name: tuple(t.shape) for name, t in native_state(model).items()}
    family = find_family(shapes)
    assert family.name == "cogvideox-small" and family.layers == 2
    inferred = family.diffusers_config(shapes)
    assert {k: model.config[k] for k in inferred if k != "patch_bias"} == {
        k: v for k, v in inferred.items() if k != "patch_bias"
    }
    assert family.image_to_video == ("i2v" in kind)
    assert "use_rotary_positional_embeddings" not in inferred  # no tensor tells: the configuration must


def test_key_map_goes_both_ways(tiny, kind, native_state):
    model = tiny(kind)
    family = find_family({name: tuple(t.shape) for name, t in native_state(model).items()})
    for name in model.state_dict():
        native = family.to_native(name)
        assert family.to_diffusers(native) == name
        assert family.to_native(native) == native and family.to_diffusers(name) == name


@pytest.mark.parametrize(
    ("diffusers", "native"),
    [
        ("transformer_blocks.11.attn1.to_q.weight", "blocks.11.q.weight"),
        ("transformer_blocks.0.attn1.to_out.0.bias", "blocks.0.attn_out.bias"),
        ("transformer_blocks.0.attn1.norm_k.weight", "blocks.0.norm_k.weight"),
        ("transformer_blocks.3.ff.net.0.proj", "blocks.3.ff_proj"),
        ("transformer_blocks.3.ff.net.2.weight", "blocks.3.ff_out.weight"),
        ("transformer_blocks.3.norm1.linear.bias", "blocks.3.norm1.linear.bias"),
        ("time_embedding.linear_1.weight", "time_embedding_linear_1.weight"),
        ("ofs_embedding.linear_2.bias", "ofs_embedding_linear_2.bias"),
        ("norm_out.linear.weight", "norm_out.linear.weight"),
        ("patch_embed.proj.weight", "patch_embed.proj.weight"),
    ],
)
def test_key_map(diffusers, native):
    family = FAMILIES["cogvideox-5b"]
    assert family.to_native(diffusers) == native == to_native(diffusers)
    assert family.to_diffusers(native) == diffusers


def test_layers_to_quantize():
    family = FAMILIES["cogvideox-2b"]
    assert len(family.block_layers()) == 30 * 6 and len(family.modulation_layers()) == 30 * 2 + 1
    assert all(f"{layer}.weight" in family.tensor_shapes() for layer in family.block_layers())


def test_other_architectures_are_unknown():
    with pytest.raises(ValueError, match=r"no model this pack knows.*CogVideoX-2B"):
        find_family({"blocks.0.attn.qkv.weight": (3, 3), "x_embedder.weight": (3, 3)})
    with pytest.raises(ValueError, match="no model this pack knows"):
        find_family({})


def test_an_unpublished_variant_is_refused():
    shapes = FAMILIES["cogvideox-5b"].tensor_shapes()
    shapes["patch_embed.proj.weight"] = (3072, 33, 2, 2)
    with pytest.raises(ValueError, match=r"33 input channels.*CogVideoX-5B-I2V 32"):
        find_family(shapes)


@pytest.mark.parametrize("name", ["patch_embed.proj.weight", "proj_out.weight"])
def test_a_deciding_tensor_is_missing(name):
    shapes = FAMILIES["cogvideox-5b"].tensor_shapes()
    del shapes[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        find_family(shapes)


def test_a_cut_off_5b_is_not_taken_for_a_small_model():
    shapes = {n: s for n, s in FAMILIES["cogvideox-5b"].tensor_shapes().items() if "blocks.41" not in n}
    assert find_family(shapes).layers == 42  # so that the missing tensors are named when it is opened


@pytest.mark.parametrize(
    ("name", "layers", "heads", "dtype", "shift", "scaling", "size", "frames", "step", "rotary"),
    [
        ("cogvideox-2b", 30, 30, "float16", 3.0, 1.15258426, (480, 720), 49, 8, False),
        ("cogvideox-5b", 42, 48, "bfloat16", 1.0, 0.7, (480, 720), 49, 8, True),
        ("cogvideox-5b-i2v", 42, 48, "bfloat16", 1.0, 0.7, (480, 720), 49, 8, True),
        ("cogvideox-1.5-5b", 42, 48, "bfloat16", 1.0, 0.7, (768, 1360), 81, 16, True),
        ("cogvideox-1.5-5b-i2v", 42, 48, "bfloat16", 1.0, 0.7, (768, 1360), 81, 16, True),
    ],
)
def test_published_facts(name, layers, heads, dtype, shift, scaling, size, frames, step, rotary):
    family = FAMILIES[name]
    assert (family.layers, family.heads, family.native_dtype) == (layers, heads, dtype)
    assert (family.snr_shift_scale, family.vae_scaling_factor) == (shift, scaling)
    assert (family.size, family.frames, family.frame_step, family.rotary) == (size, frames, step, rotary)
    assert family.frames % family.frame_step == 1 and family.licence != "unknown"
