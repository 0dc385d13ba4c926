"""Stage `transformer`: train the denoiser and the text encoder together on latents.

    loss = mean (v_theta(x_t, t, text) - v)^2,   t stratified over the batch, 10 % of the captions empty

The learning rate follows the time used, over all commands of the stage, so a stopped stage resumes on the same
curve: weights, averages and moments of the optimizers are kept in `WORK`/state.safetensors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .ema import EMA, Clock, decay_groups, rate_at
from .models import make_scheduler, make_text_encoder, make_transformer, rotary_tables
from .muon import Muon
from .tokenizer import load_tokenizer, token_ids

EMPTY_SHARE = 0.1
LOG_EVERY = 100


@dataclass(frozen=True)
class TransformerSettings:
    """How the stage trains.

    Attributes:
        total_seconds: training time in all, without loading and compilation.
        stop_after: seconds of this command, from its start, after which it saves its state; None: never.
        batch: clips a step.
        rate: peak learning rate.
        warmup: steps of its rise.
        decay: of the moving average.
        seed: of weights and noise.
        tiny: small networks, for tests.
        graph: launch a step as one CUDA graph (on a GPU).
    """

    total_seconds: float
    stop_after: float | None = None
    batch: int = 128
    rate: float = 1e-3
    warmup: int = 500
    decay: float = 0.9995
    seed: int = 0
    tiny: bool = False
    graph: bool = True


def make_networks(tiny: bool = False) -> nn.ModuleDict:
    """The text encoder ("text") and the denoiser ("transformer") with fresh weights."""
    return nn.ModuleDict(
        {"text": make_text_encoder(len(load_tokenizer()), tiny), "transformer": make_transformer(tiny)}
    )


def train_transformer(work: Path, settings: TransformerSettings, device: torch.device, begin: float) -> bool:
    """Train until the budget is used or the command must stop.

    Args:
        work: holds latents.safetensors; the state is kept here.
        settings: see there.
        device: where to train.
        begin: `time.monotonic()` at the start of the command.

    Returns:
        whether the stage is done.
    """
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    networks = make_networks(settings.tiny).to(device)
    data = load_file(work / "latents.safetensors", device=str(device))
    batches = _Batches(data["latents"], data["tokens"], settings.batch, device)
    rate = torch.tensor(settings.rate, device=device)
    optimizers = make_optimizers(networks, rate, device.type == "cuda")
    ema = EMA(networks, settings.decay)
    first, elapsed = _load_state(work, networks, ema, optimizers)
    torch.manual_seed(settings.seed + first)  # else a resumed stage repeats its noise
    print(f"transformer: {sum(p.numel() for p in networks.parameters()) / 1e6:.2f} M parameters,", end=" ")
    print(f"{len(data['latents'])} clips, from step {first} at {elapsed:.0f} s", flush=True)
    if device.type == "cuda":
        for block in networks["transformer"].transformer_blocks:
            block.compile(dynamic=False)
    total = torch.zeros((), device=device)
    rate.fill_(rate_at(settings.rate, elapsed / settings.total_seconds, first, settings.warmup))
    advance = _stepper(networks, batches, optimizers, total, device, settings.graph)
    print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
    clock, step = Clock(settings.total_seconds, elapsed), first
    mark, mark_step = clock.elapsed, first
    total.zero_()
    while clock.progress < 1:
        if settings.stop_after is not None and time.monotonic() - begin > settings.stop_after:
            break
        rate.fill_(rate_at(settings.rate, clock.progress, step, settings.warmup))
        advance()
        ema.update(step)
        step += 1
        if step % LOG_EVERY == 0:
            mean = total.item() / (step - mark_step)  # waits for the device
            pace = 1000 * (clock.elapsed - mark) / (step - mark_step)
            if step % (5 * LOG_EVERY) == 0:
                line = f"step {step} {clock.elapsed:.0f} s loss {mean:.4f}"
                print(f"{line} rate {rate.item():.2e} {pace:.1f} ms", flush=True)
            mark, mark_step = clock.elapsed, step
            total.zero_()
    done = clock.progress >= 1
    _save_state(work, networks, ema, optimizers, step, clock.elapsed)
    print(f"transformer: step {step}, {clock.elapsed:.0f} of {settings.total_seconds:.0f} s", flush=True)
    return done


def make_optimizers(networks: nn.ModuleDict, rate: torch.Tensor, cuda: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the denoiser's blocks, AdamW for all else; both read `rate` at every step."""
    blocks = networks["transformer"].transformer_blocks
    matrices = [p for p in blocks.parameters() if p.ndim == 2]
    mine = {id(p) for p in matrices}
    rest = [p for p in networks.parameters() if id(p) not in mine]
    adamw = torch.optim.AdamW(
        decay_groups(rest, 0.01), lr=rate, betas=(0.9, 0.99), fused=cuda, capturable=cuda
    )
    return [Muon(matrices, rate), adamw]


def _stepper(
    networks: nn.ModuleDict,
    batches: _Batches,
    optimizers: list[torch.optim.Optimizer],
    total: torch.Tensor,
    device: torch.device,
    graph: bool = True,
) -> Callable[[], None]:
    """A function that trains one step and adds its loss to `total`.

    On a GPU the step is one CUDA graph: launched kernel by kernel it takes 93 ms on an H200, of which the GPU
    works 37.
    """
    rotary = rotary_tables(networks["transformer"].config.attention_head_dim, device)
    parameters = list(networks.parameters())

    def advance() -> None:
        loss = _loss(networks, batches, rotary, device)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        total.add_(loss.detach())

    def fresh() -> None:
        for parameter in parameters:
            parameter.grad = None
        advance()

    if device.type != "cuda" or not graph:
        return fresh
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):  # compiles, and makes the optimizers' state
            fresh()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in parameters:
        parameter.grad = None
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        advance()
    return captured.replay


def averaged_networks(work: Path, tiny: bool = False) -> nn.ModuleDict:
    """The networks with the moving averages in `work`/state.safetensors as weights, float32 on the CPU."""
    networks = make_networks(tiny)
    state = load_file(work / "state.safetensors")
    with torch.no_grad():
        for name, parameter in networks.named_parameters():
            parameter.copy_(state[f"average.{name}"])
    return networks.eval()


class _Batches:
    """Random clips, captions, times and noise, all made on the device."""

    def __init__(self, latents: torch.Tensor, tokens: torch.Tensor, batch: int, device: torch.device):
        self.latents, self.tokens, self.batch, self.device = latents, tokens, batch, device
        self.empty = token_ids(load_tokenizer(), [""])[0].to(device)
        alphas = make_scheduler().alphas_cumprod.to(device, torch.float32)
        self.signal, self.noise = alphas.sqrt(), (1 - alphas).sqrt()

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x_t [B, 9, 16, 16, 16], t [B] int64, token ids [B, 32], v like x_t in float32."""
        n, device = self.batch, self.device
        clip = torch.randint(len(self.latents), (n,), device=device)
        ids = self.tokens[clip, torch.randint(self.tokens.shape[1], (n,), device=device)].long()
        ids = torch.where(torch.rand(n, 1, device=device) < EMPTY_SHARE, self.empty, ids)
        steps = len(self.signal)
        t = (torch.arange(n, device=device) + torch.rand(n, device=device)) * (steps / n)
        t = t.long().clamp_(max=steps - 1)
        x0 = self.latents[clip].float()
        noise = torch.randn_like(x0)
        a, b = self.signal[t].view(-1, 1, 1, 1, 1), self.noise[t].view(-1, 1, 1, 1, 1)
        return a * x0 + b * noise, t, ids, a * noise - b * x0


def _loss(
    networks: nn.ModuleDict,
    batches: _Batches,
    rotary: tuple[torch.Tensor, torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    x, t, ids, v = batches.draw()
    on_gpu = device.type == "cuda"
    with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        text = networks["text"](ids)[0]
        predicted = networks["transformer"](
            hidden_states=x.bfloat16() if on_gpu else x,
            encoder_hidden_states=text.bfloat16() if on_gpu else text,
            timestep=t,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
    return (predicted.float() - v).square().mean()


_MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum")


def _save_state(
    work: Path,
    networks: nn.Module,
    ema: EMA,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    elapsed: float,
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for (name, parameter), average in zip(networks.named_parameters(), ema.averages, strict=True):
        tensors[f"weight.{name}"] = parameter.detach()
        tensors[f"average.{name}"] = average
        for optimizer in optimizers:
            moments = optimizer.state.get(parameter, {})
            tensors |= {f"{key}.{name}": moments[key] for key in _MOMENTS if key in moments}
    save_file({k: t.contiguous().cpu() for k, t in tensors.items()}, work / "state.part")
    (work / "state.part").replace(work / "state.safetensors")
    (work / "state.json").write_text(json.dumps({"step": step, "elapsed": elapsed}) + "\n")


def _load_state(
    work: Path, networks: nn.Module, ema: EMA, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Take up a stopped stage: (steps, seconds) done so far, zeros when there is no state."""
    if not (work / "state.json").exists():
        return 0, 0.0
    tensors = load_file(work / "state.safetensors")
    record = json.loads((work / "state.json").read_text())
    for (name, parameter), average in zip(networks.named_parameters(), ema.averages, strict=True):
        parameter.data.copy_(tensors[f"weight.{name}"])
        average.copy_(tensors[f"average.{name}"])
        keys = [key for key in _MOMENTS if f"{key}.{name}" in tensors]
        owner = next(
            o for o in optimizers if any(p is parameter for g in o.param_groups for p in g["params"])
        )
        owner.state[parameter] = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in keys}
    return int(record["step"]), float(record["elapsed"])
