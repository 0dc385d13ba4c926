"""The core's own block forward against diffusers' block with the same quantized linears, run alike."""

import sys
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("diffusers")
from sixbit_diffusion.engine import attach as attach_module
from sixbit_diffusion.engine.attach import attached, block_linears, describe, swapped
from sixbit_diffusion.engine.linears import QuantizedLinear
from sixbit_diffusion.engine.schedule import Evaluation
from sixbit_diffusion.kernels import block_hadamard, quantize_nvfp4, use_backend
from sixbit_diffusion.sixbit_core import block as block_module
from sixbit_diffusion.sixbit_core.block import block_forward
from sixbit_diffusion.sixbit_core.block_parts import BlockLinear
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig, DMPQConfig
from sixbit_diffusion.sixbit_core.families.cogvideox import SMALL
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.run import BlockLayout, RunState, run_block

from .conftest import tiny_transformer

KINDS = {
    "2b": {"use_rotary_positional_embeddings": False},
    "5b": {},
    "5b-i2v": {"in_channels": 8, "use_learned_positional_embeddings": True},
    "1.5": {"patch_size_t": 2, "patch_bias": False},
    "1.5-i2v": {"patch_size_t": 2, "patch_bias": False, "in_channels": 8, "ofs_embed_dim": 32},
}
STEPS = 6
SCHEDULE = [Evaluation(1000 - t, 1.0 - t / STEPS, t / STEPS, t == STEPS - 1) for t in range(STEPS)]


def quantized_transformer(
    kind: str, dtype: torch.dtype = torch.float32, rotation: int = 64
) -> torch.nn.Module:
    """A tiny model with NVFP4 linears, whose norms, biases and modulations are not those of a new one."""
    model = tiny_transformer(**KINDS[kind]).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "blocks" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    for block in model.transformer_blocks:
        for path, linear in block_linears(block, SMALL).items():
            raw = linear.weight
            parts = quantize_nvfp4(block_hadamard(raw, rotation) if rotation else raw)
            weight = QuantizedWeight(*parts, *raw.shape, rotation)
            put = QuantizedLinear(weight, linear.bias.to(dtype))
            parent, _, leaf = SMALL.to_diffusers(f"blocks.0.{path}").split(".", 2)[2].rpartition(".")
            setattr(block.get_submodule(parent), leaf, put)
    buffers = {id(b) for m in model.modules() if isinstance(m, QuantizedLinear) for b in m.buffers()}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in buffers:
            tensor.data = tensor.data.to(dtype)
    return model


def layout(model: torch.nn.Module) -> BlockLayout:
    shapes = [
        {kind: (linear.out_features, linear.in_features) for kind, linear in block_linears(b, SMALL).items()}
        for b in model.transformer_blocks
    ]
    return BlockLayout(SMALL.linears, tuple(shapes))


def call(model: torch.nn.Module, t: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One call of the model on inputs of its own for every step."""
    config = model.config
    generator = torch.Generator().manual_seed(t // 2)  # pairs of like inputs, so that blocks may be skipped
    frames, kwargs = 4 if config.patch_size_t else 3, {}
    x = torch.randn(2, frames, config.in_channels, 4, 4, generator=generator).to(dtype)
    text = torch.randn(2, 16, 32, generator=generator).to(dtype)
    if config.use_rotary_positional_embeddings:
        tokens = frames // (config.patch_size_t or 1) * 4
        angles = torch.rand(tokens, 32, generator=generator).repeat_interleave(2, dim=1) * 6
        kwargs["image_rotary_emb"] = (angles.cos(), angles.sin())
    if config.ofs_embed_dim:
        kwargs["ofs"] = torch.tensor([2.0])
    step = torch.tensor([1000 - t] * 2)
    return model(x, text, timestep=step, return_dict=False, **kwargs)[0]


def stock_blocks(run: RunState, model: torch.nn.Module):
    """diffusers' own block forwards, the quantized linears through the run."""

    def forward(index, block, hidden_states, encoder_hidden_states, **kwargs):
        compute = partial(type(block).forward, block, hidden_states, encoder_hidden_states, **kwargs)
        return run_block(run, index, hidden_states, encoder_hidden_states, compute)

    swaps = [(model, lambda x, *args, **kwargs: begin(x, *args, **kwargs))]

    def begin(x, *args, **kwargs):
        now = SCHEDULE[1000 - int(kwargs["timestep"][0])]
        run.begin_call([("uncond", 0), ("cond", 0)], now.sigma, now.progress, now.last)
        return type(model).forward(model, x, *args, **kwargs)

    for index, block in enumerate(model.transformer_blocks):
        swaps.append((block, partial(forward, index, block)))
        for kind, linear in block_linears(block, SMALL).items():

            def product(x, index=index, kind=kind, linear=linear):
                return run.linear(index, kind, x, linear.quantized, linear.bias)

            swaps.append((linear, product))
    return swapped(swaps)


@torch.no_grad()
def both(model, dmpq, cache=None, dtype=torch.float32, steps=STEPS):
    """Predictions and report of the stock blocks and of ours, each over all steps."""
    found = []
    for own in (False, True):
        run = RunState(layout(model), dmpq, cache)
        with attached(model, run, SCHEDULE, SMALL) if own else stock_blocks(run, model):
            outputs = [call(model, t, dtype) for t in range(steps)]
            run.finish()
        found.append((torch.cat(outputs).float(), run.report()))
        run.close()
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("router", "rotation", "bar"), [("bf16", 64, 1e-5), ("int8", 64, 2e-3), ("nvfp4", 0, 2e-2)]
)
def test_equals_the_stock_block(kind, router, rotation, bar):
    model = quantized_transformer(kind, rotation=rotation)
    (expected, stock), (found, own) = both(model, DMPQConfig(router=router), steps=2)
    # An activation that another order of sums puts across a rounding border is a step off; few are.
    assert relative(found, expected) < bar
    assert own == stock and own.average_activation_bits == {"bf16": 16, "int8": 8, "nvfp4": 4}[router]


def test_mixed_formats_skips_and_refreshes_are_reported_alike():
    model = quantized_transformer("5b")
    cache = DeltaCacheConfig(threshold=1e9, max_skips=1, start=0.0)
    dmpq = DMPQConfig(router="random", outlier_limit=5.0, seed=1)
    (expected, stock), (found, own) = both(model, dmpq, cache)
    assert own == stock and relative(found, expected) < 2e-2
    letters = {letter for rows in own.choices.values() for row in rows for letter in row}
    assert letters == {"4", "8", "b", "-"}
    with_q = [own.choices[kind][0] for kind in ("q", "k", "v")]
    assert len(set(with_q)) > 1  # linears of one input in different formats


def test_bfloat16_is_as_near_to_float32_as_the_stock_block():
    router = DMPQConfig(router="int8")
    exact = both(quantized_transformer("5b"), router, steps=1)[0][0]
    (stock, _), (own, _) = both(
        quantized_transformer("5b", torch.bfloat16), router, dtype=torch.bfloat16, steps=1
    )
    assert relative(own, exact) < 1.1 * relative(stock, exact) < 0.05


def test_a_branch_sees_the_input_and_adds_to_the_output():
    model = quantized_transformer("5b")
    block, seen = model.transformer_blocks[0], []
    parts = describe(block, SMALL)

    def branch(x, y):
        seen.append(tuple(x.shape))
        return y + 1.0

    def run_with(parts):
        run = RunState(layout(model), DMPQConfig(router="int8"))
        run.begin_call([("cond", 0)], 1.0, 0.0, False)
        inp = torch.ones(1, 6, 128), torch.ones(1, 2, 128)
        out = run_block(run, 0, *inp, lambda: block_forward(run, 0, parts, *inp, torch.ones(1, 32)))
        return out, run.report()

    plain, report = run_with(parts)
    linears = dict(parts.linears)
    linears["ff_out"] = BlockLinear(linears["ff_out"].weight, linears["ff_out"].bias, branch)
    (video, text), branched = run_with(type(parts)(**{**vars(parts), "linears": linears}))
    gates = parts.modulations[1](torch.nn.functional.silu(torch.ones(1, 32))).view(1, 6, 128)
    assert seen == [(8, 512)] and branched == report
    torch.testing.assert_close(video - plain[0], gates[:, 2:3].expand_as(video), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(text - plain[1], gates[:, 5:6].expand_as(text), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons hold arguments until a call returns")
def test_the_widest_tensor_is_freed_before_the_next_product(monkeypatch):
    model, alive, products = quantized_transformer("5b"), [], []
    gelu, product = block_module.gelu_int8, block_module.int8_linear

    def watched_gelu(x, *args):
        alive.append(weakref.ref(x))
        return gelu(x, *args)

    def watched_product(*args):
        products.append([ref() is None for ref in alive])
        return product(*args)

    monkeypatch.setattr(block_module, "gelu_int8", watched_gelu)
    monkeypatch.setattr(block_module, "int8_linear", watched_product)
    both(model, DMPQConfig(router="int8"), steps=1)
    assert len(alive) == 2 and len(products) == 8 and all(all(freed) for freed in products)


def test_the_feed_forward_in_pieces_is_the_same(monkeypatch):
    model = quantized_transformer("5b")
    cache = DeltaCacheConfig(threshold=0.0)
    inp = torch.randn(2, 21, 128), torch.randn(2, 3, 128)
    parts, product = describe(model.transformer_blocks[0], SMALL), block_module.int8_linear
    cast, casts = block_module.int8_weight, []
    monkeypatch.setattr(
        block_module, "int8_weight", lambda weights: (casts.append(len(weights)), cast(weights))[1]
    )

    def result(piece: int):
        monkeypatch.setattr(block_module, "PIECE", piece)
        rows: list[int] = []
        monkeypatch.setattr(
            block_module, "int8_linear", lambda q, *rest: (rows.append(len(q)), product(q, *rest))[1]
        )
        run = RunState(layout(model), DMPQConfig(router="int8"), cache)
        run.begin_call([("uncond", 0), ("cond", 0)], 1.0, 0.0, False)
        out = run_block(run, 0, *inp, lambda: block_forward(run, 0, parts, *inp, torch.ones(2, 32)))
        run.finish()
        return out, rows, run._memory[0].ratios

    whole, rows, ratios = result(48)
    assert rows == [48, 48, 48, 48]
    for piece, expected in (
        (47, [48, 48, 24, 24, 48]),
        (12, [24] * 4 + [12, 12, 24] * 2),  # the attention of each row, then the feed-forwards
        (7, [24] * 4 + [*[6] * 4, 24] * 2),
        (5, [24] * 4 + [5, 5, 5, 5, 4, 24] * 2),
    ):
        casts.clear()
        pieces, rows, same_ratios = result(piece)
        assert rows == expected and casts == [3, 1, 1, 1]  # q, k and v as one; once for all rows and pieces
        assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
        torch.testing.assert_close(list(same_ratios.values()), list(ratios.values()))


@pytest.mark.parametrize("router", ["nvfp4", "random", "bf16"])
def test_any_feed_forward_is_never_wide_for_all_rows(monkeypatch, router):
    """Outputs, report and outlier ratios as of all rows at once; whoever wants the inputs gets them whole."""
    model, wide = quantized_transformer("5b"), []
    inp = torch.randn(2, 21, 128), torch.randn(2, 3, 128)
    parts, gelu = describe(model.transformer_blocks[0], SMALL), torch.nn.functional.gelu
    monkeypatch.setattr(
        torch.nn.functional, "gelu", lambda x, **how: (wide.append(x.numel() // 512), gelu(x, **how))[1]
    )

    class Curious(RunState):
        def linear(self, *args, **kwargs):
            return super().linear(*args, **kwargs)

    def result(piece: int, kind: type = RunState):
        wide.clear()
        monkeypatch.setattr(block_module, "PIECE", piece)
        run = kind(layout(model), DMPQConfig(router=router), DeltaCacheConfig(threshold=0.0))
        run.begin_call([("uncond", 0), ("cond", 0)], 1.0, 0.0, False)
        out = run_block(run, 0, *inp, lambda: block_forward(run, 0, parts, *inp, torch.ones(2, 32)))
        run.finish()
        return out, list(wide), run._memory[0].ratios, run.report()

    whole, rows, ratios, told = result(48)
    assert rows == [48] and ratios.keys() == {"q", "attn_out", "ff_proj", "ff_out"}
    for piece, kind, expected in (
        (12, RunState, [12] * 4),
        (5, RunState, [5, 5, 5, 5, 4] * 2),
        (5, Curious, [48]),
    ):
        pieces, rows, same_ratios, same = result(piece, kind)
        assert rows == expected and same == told
        torch.testing.assert_close(pieces, whole)
        torch.testing.assert_close(list(same_ratios.values()), list(ratios.values()))


@pytest.mark.parametrize("router", ["int8", "random"])
def test_row_after_row_is_the_same(monkeypatch, router):
    """Predictions and report bit for bit, with skips and refreshes; whoever asks for all rows gets them."""
    model, shapes, found = quantized_transformer("5b"), [], []
    cache = DeltaCacheConfig(threshold=0.9, start=0.0)
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v):
        shapes.append(q.shape[0])
        return attention(q, k, v)

    def describe_watched(*args, together):
        return replace(describe(*args), attention=watched, together=together)

    for piece, together in ((99, False), (4, False), (4, True)):
        monkeypatch.setattr(block_module, "PIECE", piece)
        monkeypatch.setattr(attach_module, "describe", partial(describe_watched, together=together))
        shapes.clear()
        run = RunState(layout(model), DMPQConfig(router=router, bits=6.0), cache)
        with attached(model, run, SCHEDULE, SMALL), torch.no_grad():
            outputs = [call(model, t) for t in range(STEPS)]
            run.finish()
        assert set(shapes) == ({2} if piece == 99 or together else {1})
        found.append((torch.cat(outputs), run.report()))
    (whole, told), *others = found
    assert 0 < told.skipped_fraction < 1 and (router == "int8" or 4 < told.average_activation_bits < 8)
    for rows, report in others:
        assert torch.equal(rows, whole) and report == told


def on_both_backends(
    model: torch.nn.Module, dtype: torch.dtype, tokens: int, refuse_waits: bool = False
) -> list[float]:
    """Errors of video and text, twins against references, of the first block on slices of one tensor; the
    outlier ratios of all inputs are watched, and alike."""
    device = model.device
    joint = torch.randn(2, 2 + tokens, 128, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    angles = (
        torch.rand(tokens, 32, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, 1).to(device)
    )
    inp, time = (joint[:, 2:], joint[:, :2]), torch.ones(2, 32, device=device, dtype=dtype)
    parts, found, ratios = describe(model.transformer_blocks[0], SMALL), [], []
    for backend in ("reference", "triton"):
        cache = DeltaCacheConfig(threshold=0.0)
        run = RunState(layout(model), DMPQConfig(router="int8"), cache)
        run.begin_call([("uncond", 0), ("cond", 0)], 1.0, 0.0, False)
        rotary = (angles.cos(), angles.sin())
        if refuse_waits and backend == "triton":
            torch.cuda.set_sync_debug_mode("error")
        try:
            with use_backend(backend), torch.no_grad():
                compute = partial(block_forward, run, 0, parts, *inp, time, rotary)
                found.append(run_block(run, 0, *inp, compute))
        finally:
            if refuse_waits:
                torch.cuda.set_sync_debug_mode("default")
        run.finish()
        ratios.append(run._memory[0].ratios)
        run.close()
    assert ratios[0].keys() == ratios[1].keys() == {"q", "attn_out", "ff_proj", "ff_out"}
    torch.testing.assert_close(list(ratios[1].values()), list(ratios[0].values()), rtol=2e-2, atol=0)
    return [relative(twin.float(), own.float()) for own, twin in zip(*found, strict=True)]


BARS = {torch.float32: 1e-3, torch.bfloat16: 1e-2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_twins_compute_the_same_block_in_the_interpreter(dtype=torch.bfloat16):
    pytest.importorskip("triton")
    assert max(on_both_backends(quantized_transformer("5b", dtype), dtype, tokens=12)) < BARS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BARS)
def test_twins_compute_the_same_block_on_a_gpu_without_a_wait(dtype):
    model = quantized_transformer("5b", dtype).cuda()
    on_both_backends(model, dtype, tokens=1000)  # compiles, which may wait
    assert max(on_both_backends(model, dtype, tokens=1000, refuse_waits=True)) < BARS[dtype]


def test_attention_kwargs_are_refused():
    model = quantized_transformer("5b")
    run = RunState(layout(model), DMPQConfig(router="int8"))
    with attached(model, run, SCHEDULE, SMALL), pytest.raises(ValueError, match="attention_kwargs, got x"):
        model.transformer_blocks[0](
            torch.ones(1, 6, 128), torch.ones(1, 2, 128), temb=torch.ones(1, 32), attention_kwargs={"x": 1}
        )
