"""Stage `transformer`: train the denoiser and the text encoder together on latents.

    loss = mean (v_theta(x_t, t, text) - v)^2,   t stratified over the batch, 10 % of the captions empty

The learning rate follows the time used, over all commands of the stage, so a stopped stage resumes on the
same curve: weights, averages and moments of the optimizers are kept in `WORK`/state.safetensors. A stage may
also start from the weights of a pipeline folder, with fresh optimizers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors.torch import load_file
from torch import nn
from transformers import T5EncoderModel

from .batches import Batches
from .ema import EMA, Clock, decay_groups, rate_at
from .models import make_text_encoder, make_transformer, rotary_tables
from .muon import Muon
from .state import load_state, save_state
from .tokenizer import load_tokenizer

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
        start: a pipeline folder whose weights a new stage starts from; repeat it when the stage is resumed.
        pair_share: how often a clip with two objects is drawn; None: as often as the data hold them.
        spin_share: likewise for clips that spin.
        deep: the shape of a new transformer, see `make_transformer`.
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
    start: Path | None = None
    pair_share: float | None = None
    spin_share: float | None = None
    deep: bool = False


def make_networks(tiny: bool = False, start: Path | None = None, deep: bool = False) -> nn.ModuleDict:
    """Text encoder ("text") and denoiser ("transformer"), fresh or of the pipeline in `start`; float32."""
    if start is not None:
        if not (start / "model_index.json").exists():
            raise ValueError(f"--from needs a pipeline folder with a model_index.json, got {start}")
        text = T5EncoderModel.from_pretrained(start / "text_encoder")
        transformer = CogVideoXTransformer3DModel.from_pretrained(start / "transformer")
        return nn.ModuleDict({"text": text.float(), "transformer": transformer.float()}).train()
    return nn.ModuleDict(
        {"text": make_text_encoder(len(load_tokenizer()), tiny), "transformer": make_transformer(tiny, deep)}
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
    networks = make_networks(settings.tiny, settings.start, settings.deep).to(device)
    data = load_file(work / "latents.safetensors", device=str(device))
    batches = Batches(data, settings.batch, settings.pair_share, settings.spin_share)
    rate = torch.tensor(settings.rate, device=device)
    optimizers = make_optimizers(networks, rate, device.type == "cuda")
    ema = EMA(networks, settings.decay, rising=settings.start is None)
    first, elapsed = load_state(work, networks, ema, optimizers, settings.start is not None)
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
    record = {"step": step, "elapsed": clock.elapsed, "warm": settings.start is not None}
    save_state(work, networks, ema, optimizers, record)
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
    batches: Batches,
    optimizers: list[torch.optim.Optimizer],
    total: torch.Tensor,
    device: torch.device,
    graph: bool = True,
) -> Callable[[], None]:
    """A function that trains one step and adds its loss to `total`.

    On a GPU the step is one CUDA graph: launched kernel by kernel it takes 93 ms on an H200, of which the GPU
    works 37.
    """
    config = networks["transformer"].config
    rotary = None
    if config.use_rotary_positional_embeddings:
        rotary = rotary_tables(config.attention_head_dim, device)
    parameters = list(networks.parameters())

    def advance() -> None:
        loss = loss_of(networks, batches, rotary, device)
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


def averaged_networks(work: Path, tiny: bool = False, deep: bool = False) -> nn.ModuleDict:
    """The networks with the moving averages in `work`/state.safetensors as weights, float32 on the CPU."""
    networks = make_networks(tiny, deep=deep)
    state = load_file(work / "state.safetensors")
    with torch.no_grad():
        for name, parameter in networks.named_parameters():
            parameter.copy_(state[f"average.{name}"])
    return networks.eval()


def loss_of(
    networks: nn.ModuleDict,
    batches: Batches,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
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
