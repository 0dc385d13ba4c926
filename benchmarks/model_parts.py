"""What `model.py` measures: a model of true size with random weights, as baselines run it and as we do."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import CogVideoXTransformer3DModel
from measure import elapsed_ms, relative
from sixbit_diffusion.engine.attach import attached, block_linears, describe
from sixbit_diffusion.engine.linears import QuantizedLinear, waiting
from sixbit_diffusion.engine.schedule import Evaluation
from sixbit_diffusion.kernels import block_hadamard, hadamard_block_size, quantize_nvfp4, use_backend
from sixbit_diffusion.sixbit_core.block import block_forward
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig, DMPQConfig
from sixbit_diffusion.sixbit_core.delta_codecs import bytes_on_gpu
from sixbit_diffusion.sixbit_core.families.cogvideox import PUBLISHED, CogVideoXFamily
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.memory import sampling_bytes
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.report import RunReport
from sixbit_diffusion.sixbit_core.run import RunState, run_block
from sixbit_diffusion.sixbit_core.skip import SKIP_POLICIES, Observation
from torch import nn

Call = Callable[[], object]
POLICY = "benchmark"


@dataclass(frozen=True)
class Config:
    """A model and the latents of its clip: (frames, height, width), and text tokens."""

    family: CogVideoXFamily
    latents: tuple[int, int, int]
    text: int = 226
    dtype: torch.dtype = torch.bfloat16


_2B, _5B, _, _15 = PUBLISHED[:4]
_TINY = replace(_5B, layers=3, heads=4, time_embed_dim=32, text_embed_dim=32, sample_size=(4, 4), frames=9)
CONFIGS = {
    "2b": Config(_2B, (13, 60, 90)),
    "5b": Config(_5B, (13, 60, 90)),
    "1.5-5b": Config(_15, (22, 96, 170)),
    "tiny": Config(_TINY, (3, 4, 4), text=6),
}


class Bench:
    """Baselines and ours over the same random weights and inputs, a CFG batch of two.

    Args:
        stock: keep the 16-bit model; without it there are no baselines, and it is never there whole.
    """

    def __init__(self, config: Config, device: torch.device, stock: bool = True) -> None:
        self.config, self.family, self.device = config, config.family, device
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.dtype)
        try:
            with device if stock else torch.device("meta"):
                self.stock = CogVideoXTransformer3DModel(**_constructor(config))
        finally:
            torch.set_default_dtype(before)
        self.stock.eval().requires_grad_(False)
        self.ours = _quantized(self.stock, self.family, device)
        self.models: dict[str, nn.Module] = {"diffusers": self.stock, "ours": self.ours}
        shapes = {k: (m.out_features, m.in_features) for k, m in self._linears(self.ours, 0).items()}
        self.layout = BlockLayout(self.family.linears, (shapes,) * self.family.layers)
        self.latents, self.text, self.rotary = self._inputs()
        self.step = torch.full((2,), 500, device=device)

    def weight_bytes(self, name: str) -> int:
        """Bytes of a model's parameters and buffers on the device."""
        model = self.models[name]
        tensors = itertools.chain(model.parameters(), model.buffers())
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == self.device.type)

    def expected_bytes(self, location: str) -> int:
        """What `sixbit check` says of a loop of ours, with the delta cache there."""
        tokens = self.text.shape[1] + self.latents[0, :, 0].numel() // (
            self.family.patch_size**2 * (self.family.patch_size_t or 1)
        )
        itemsize = self.config.dtype.itemsize
        cache = bytes_on_gpu(location, tokens, self.family.width, self.family.layers, 2, self.config.dtype)
        return (
            self.weight_bytes("ours") + cache + sampling_bytes("int8", tokens, self.family.width, itemsize, 2)
        )

    def baseline(self, name: str) -> Call:
        """One forward of a baseline."""
        if name.startswith("comfy"):
            model = _comfyui(self)
            if name == "comfy-kitchen":
                _kitchen_linears(model, self.family)
            if name == "comfyui-compiled":
                for block in model.blocks:
                    block.compile()
            self.models[name] = model
            x = self.latents.transpose(1, 2).contiguous()
            return lambda: model(x, self.step, self.text)
        if name == "compiled":
            model = self.models[name] = _twin(self.stock)
            for block in model.transformer_blocks:
                block.compile()
        return lambda: self._call(self.models[name], self.step)

    def run(self, cache: DeltaCacheConfig | None = None) -> RunState:
        """A fresh run with INT8 activations, and PDR where blocks are skipped."""
        return RunState(self.layout, DMPQConfig(router="int8"), cache)

    @contextmanager
    def deciding(self, run: RunState, evaluations: int) -> Iterator[Callable[..., torch.Tensor]]:
        """Inside, our model runs under `run`: (evaluation[, latents]) -> prediction."""
        steps = torch.arange(evaluations, device=self.device)
        schedule = [
            Evaluation(n, float(evaluations - n), n / evaluations, n == evaluations - 1)
            for n in range(evaluations)
        ]
        with attached(self.ours, run, schedule, self.family):
            yield lambda n, latents=None: self._call(self.ours, steps[n].expand(2), latents)

    def timed_loop(
        self, skip: str | None, evaluations: int, location: str = "gpu"
    ) -> tuple[float, RunReport]:
        """Milliseconds of a loop of ours, and what was skipped; a short loop before it warms up."""
        SKIP_POLICIES[POLICY] = skip_pattern(skip, self.family.layers, evaluations)
        cache = None
        if skip is not None:
            cache = DeltaCacheConfig(policy=POLICY, start=0.0, max_skips=99, location=location)
        for count in (min(evaluations, 8), evaluations):
            run = self.run(cache)
            with self.deciding(run, evaluations) as call:
                ms = elapsed_ms(lambda n=count, call=call, run=run: self._loop(call, n, run), self.device)
            report = run.report()
            run.close()
        return ms, report

    def timed_baseline_loop(self, call: Call, evaluations: int) -> float:
        """Milliseconds of as many evaluations of a baseline, whose inputs do not matter to its time."""
        call()
        return elapsed_ms(lambda: [call() for _ in range(evaluations)], self.device)

    def block_errors(self, count: int) -> list[tuple[int, float, float]]:
        """(block, error of its output, of its residual) against the float32 reference of the same block, the
        larger of video and text, for some blocks on the inputs that they have in a forward.

        The residual is what is left of two larger numbers, rounded to 16 bits: its error is mostly theirs.
        """
        chosen = sorted({round(n * (self.family.layers - 1) / max(1, count - 1)) for n in range(count)})
        seen, run = {}, self.run()
        hooks = [
            self.ours.transformer_blocks[n].register_forward_pre_hook(
                lambda _, args, kwargs, n=n: seen.update({n: kwargs}), with_kwargs=True
            )
            for n in chosen
        ]
        with self.deciding(run, 2) as call:
            call(0)
        for hook in hooks:
            hook.remove()
        return [(n, *self._block_error(run, n, seen[n])) for n in chosen]

    def _block_error(self, run: RunState, index: int, given: dict) -> tuple[float, float]:
        parts = describe(self.ours.transformer_blocks[index], self.family)
        rotary = given["image_rotary_emb"]

        def compute(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            video, text, time = (
                given[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states", "temb")
            )
            own = lambda: block_forward(run, index, parts, video, text, time, rotary)  # noqa: E731
            return run_block(run, index, video, text, own)

        found = compute(self.config.dtype)
        with use_backend("reference"):
            exact = compute(torch.float32)
        before = given["hidden_states"], given["encoder_hidden_states"]
        triples = list(zip(found, exact, before, strict=True))
        output = max(relative(y, reference) for y, reference, _ in triples)
        return output, max(relative(y.float() - x.float(), r - x.float()) for y, r, x in triples)

    def _loop(self, call: Callable[..., torch.Tensor], evaluations: int, run: RunState) -> None:
        latents = self.latents[:1]
        for n in range(evaluations):
            uncond, cond = call(n, latents.expand(2, -1, -1, -1, -1)).chunk(2)
            latents = 0.98 * latents + 0.02 * (uncond + 6.0 * (cond - uncond))
        run.finish()

    def _call(
        self, model: nn.Module, step: torch.Tensor, latents: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.latents if latents is None else latents
        return model(x, self.text, timestep=step, image_rotary_emb=self.rotary, return_dict=False)[0]

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        family, (frames, height, width) = self.family, self.config.latents
        place = {"device": self.device, "dtype": self.config.dtype}
        latents = torch.randn(2, frames, family.in_channels, height, width, **place)
        text = torch.randn(2, self.config.text, family.text_embed_dim, **place)
        if not family.rotary:
            return latents, text, None
        tokens = frames // (family.patch_size_t or 1) * (height // 2) * (width // 2)
        angles = torch.rand(tokens, family.head_dim // 2, device=self.device).repeat_interleave(2, dim=1) * 6
        return latents, text, (angles.cos(), angles.sin())

    def _linears(self, model: nn.Module, block: int) -> dict[str, nn.Module]:
        return block_linears(model.transformer_blocks[block], self.family)


def skip_pattern(skip: str | None, blocks: int, evaluations: int) -> Callable[[Observation, object], bool]:
    """Which block skips when: a share, spread evenly, or the skips of a report stretched to this size."""
    if skip is None:
        return lambda seen, config: False
    if not Path(skip).is_file():
        tenths = round(float(skip) * 10)
        return lambda seen, config: (3 * seen.block + 7 * seen.evaluation) % 10 < tenths
    choices = json.loads(Path(skip).read_text(encoding="utf-8"))["choices"]
    rows = next(iter(choices.values()))

    def recorded(seen: Observation, config: object) -> bool:
        row = rows[seen.block * len(rows) // blocks]
        return row[seen.evaluation * len(row) // evaluations] == "-"

    return recorded


def _constructor(config: Config) -> dict[str, object]:
    bias = {f"{config.family.blocks}.0.q.bias": (1,)}
    return {**config.family.diffusers_config(bias), "max_text_seq_length": config.text}


def _twin(model: nn.Module) -> nn.Module:
    """Another module over the same tensors."""
    with torch.device("meta"):
        other = type(model).from_config(model.config)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        _set(other, name, tensor)
    return other.eval()


def _set(model: nn.Module, path: str, value: object) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)


def _quantized(model: nn.Module, family: CogVideoXFamily, device: torch.device) -> nn.Module:
    """The model with NVFP4 linears, rounded to nearest, in place of its block and adaLN linears; one on the
    meta device with random weights, made tensor by tensor."""
    other = _twin(model)
    rotated = {family.to_diffusers(name) for name in family.block_layers()}
    for path in [*rotated, *map(family.to_diffusers, family.modulation_layers())]:
        linear = model.get_submodule(path)
        block = hadamard_block_size(linear.in_features) if path in rotated else 0
        dense = _real(linear.weight, device).float()
        parts = quantize_nvfp4(block_hadamard(dense, block) if block > 1 else dense)
        weight = QuantizedWeight(*parts, *dense.shape, block)
        if path not in rotated and dense.is_cuda:  # as the engine loads them
            weight = waiting(weight, dense.device)
        _set(other, path, QuantizedLinear(weight, _real(linear.bias, device)))
    for name, tensor in list(itertools.chain(other.named_parameters(), other.named_buffers())):
        if tensor.is_meta:
            _set(other, name, nn.Parameter(_real(tensor, device), requires_grad=False))
    return other


def _real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor, or random numbers for one on the meta device."""
    if not tensor.is_meta:
        return tensor.detach()
    return torch.randn(tensor.shape, device=device, dtype=tensor.dtype) * 0.02


def _comfyui(bench: Bench) -> nn.Module:
    """ComfyUI's own transformer over the weights of the diffusers model."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = bench.device.type == "cpu"
    import comfy.ops
    from comfy.ldm.cogvideo.model import CogVideoXTransformer3DModel as Native

    given = bench.stock.config
    names = (
        "num_attention_heads",
        "attention_head_dim",
        "in_channels",
        "out_channels",
        "time_embed_dim",
        "text_embed_dim",
        "num_layers",
        "sample_width",
        "sample_height",
        "sample_frames",
        "patch_size",
        "patch_size_t",
        "max_text_seq_length",
        "use_rotary_positional_embeddings",
    )
    model = Native(
        **{name: given[name] for name in names},
        device=bench.device,
        dtype=bench.config.dtype,
        operations=comfy.ops.disable_weight_init,
    )
    state = {bench.family.to_native(name): tensor for name, tensor in bench.stock.state_dict().items()}
    missing, _ = model.load_state_dict(state, strict=False, assign=True)
    if missing:
        raise RuntimeError(f"this ComfyUI's CogVideoX wants {missing[0]}, which diffusers' does not have")
    return model.eval().requires_grad_(False)


class _KitchenLinear(nn.Module):
    """comfy-kitchen's INT8 linear with rotation on random weights, which its time does not depend on."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        place = linear.weight.device
        weight = torch.randint(-127, 128, linear.weight.shape, dtype=torch.int8, device=place)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.tensor(1e-4, device=place))
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import comfy_kitchen

        return comfy_kitchen.int8_linear(x, self.weight, self.scale, self.bias, x.dtype, convrot=True)


def _kitchen_linears(model: nn.Module, family: CogVideoXFamily) -> None:
    for path in family.block_layers():
        _set(model, path, _KitchenLinear(model.get_submodule(path)))
