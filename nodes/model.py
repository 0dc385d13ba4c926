"""CogVideoX as the host runs it, with what its own class leaves out put right.

The host's model knows neither the positions that 1.0 weights were trained with at sizes other than its own
counting, nor the noise schedule its stock samplers need; `positions` and `schedule` say what is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_base
import comfy.model_sampling
import torch
from comfy.ldm.cogvideo.model import CogVideoXPatchEmbed, CogVideoXTransformer3DModel

from .clip import SPATIAL, ClipRules
from .linear import QuantizedLinear
from .memory import sampling_bytes_of
from .positions import Grid, rotary_table, sincos_table
from .reserve import reserved_bytes, running_blocks
from .schedule import at_terminal, sigmas

_ARGUMENTS = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "time_embed_dim",
    "ofs_embed_dim",
    "text_embed_dim",
    "num_layers",
    "sample_width",
    "sample_height",
    "sample_frames",
    "patch_size",
    "patch_size_t",
    "max_text_seq_length",
)


@dataclass(frozen=True)
class ModelPlan:
    """What `SixBitCogVideoX` is built from.

    Attributes:
        config: arguments of the diffusers transformer's constructor.
        label: of the model, for messages.
        quantized: NVFP4 layer -> ((out, in), hadamard).
        snr_shift_scale: of the noise schedule.
        inverted_image_latents: image latents are divided by the VAE's scale, not multiplied (1.5 I2V).
    """

    config: dict[str, Any]
    label: str
    quantized: dict[str, tuple[tuple[int, int], int]]
    snr_shift_scale: float
    inverted_image_latents: bool

    @property
    def rules(self) -> ClipRules:
        """Which clips it makes."""
        config = self.config
        learned = bool(config.get("use_learned_positional_embeddings"))
        own = (config["sample_width"] * SPATIAL, config["sample_height"] * SPATIAL) if learned else None
        return ClipRules(
            self.label, config["out_channels"], config["patch_size"], config["patch_size_t"] or 1, own
        )


class PatchEmbed(CogVideoXPatchEmbed):
    """The host's patch embedding, with diffusers' additive positions."""

    def __init__(self, plan: ModelPlan, device: Any, dtype: torch.dtype, operations: Any) -> None:
        config = plan.config
        super().__init__(
            patch_size=config["patch_size"],
            patch_size_t=config["patch_size_t"],
            in_channels=config["in_channels"],
            dim=config["num_attention_heads"] * config["attention_head_dim"],
            text_dim=config["text_embed_dim"],
            use_positional_embeddings=False,
            use_learned_positional_embeddings=False,
            device=device,
            dtype=dtype,
            operations=operations,
        )
        self.config = config
        self.learned = bool(config.get("use_learned_positional_embeddings"))
        self.sincos = not self.learned and not config.get("use_rotary_positional_embeddings")
        if self.learned:
            frames = (config["sample_frames"] - 1) // config.get("temporal_compression_ratio", 4) + 1
            frames //= self.patch_size_t or 1
            own = (
                frames,
                config["sample_height"] // self.patch_size,
                config["sample_width"] // self.patch_size,
            )
            self.own_grid: Grid = own
            length = config["max_text_seq_length"] + own[0] * own[1] * own[2]
            self.register_buffer(
                "pos_embedding", torch.empty(1, length, self.dim, device=device, dtype=dtype)
            )

    def forward(self, text_embeds: torch.Tensor, image_embeds: torch.Tensor) -> torch.Tensor:
        """Text (B, T, D_text) and latents (B, frames, C, H, W) to joint tokens (B, T + video, D)."""
        joint = super().forward(text_embeds, image_embeds)
        if not self.learned and not self.sincos:
            return joint
        frames, _, height, width = image_embeds.shape[1:]
        grid = (frames // (self.patch_size_t or 1), height // self.patch_size, width // self.patch_size)
        table = self._table(grid, text_embeds.shape[1], joint.device)
        return joint + table.to(joint.dtype)

    def _table(self, grid: Grid, text: int, device: torch.device) -> torch.Tensor:
        """What is added to text and video tokens. A learned table is for its own length; as in diffusers any
        other length takes sincos positions."""
        if self.learned and grid == self.own_grid:
            table, first = self.pos_embedding[0].to(device), self.config["max_text_seq_length"]
            lead = torch.nn.functional.pad(table[: min(text, first)], (0, 0, 0, max(0, text - first)))
            return torch.cat([lead, table[first:]])
        scales = (
            self.config.get("spatial_interpolation_scale", 1.875),
            self.config.get("temporal_interpolation_scale", 1.0),
        )
        video = sincos_table(grid, self.dim, *scales, device)
        return torch.nn.functional.pad(video, (0, 0, text, 0))


class Transformer(CogVideoXTransformer3DModel):
    """The host's transformer with diffusers' positions and, where the file has them, NVFP4 Linears."""

    def __init__(
        self, plan: ModelPlan, dtype: torch.dtype, device: Any = None, operations: Any = None, **_: Any
    ) -> None:
        config = plan.config
        super().__init__(
            **{name: config[name] for name in _ARGUMENTS},
            use_rotary_positional_embeddings=True,  # additive positions are those of our PatchEmbed
            device=device,
            dtype=dtype,
            operations=operations,
        )
        self.use_rotary_positional_embeddings = bool(config.get("use_rotary_positional_embeddings"))
        self.patch_embed = PatchEmbed(plan, device, dtype, operations)
        for name, ((rows, columns), hadamard) in plan.quantized.items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(parent), leaf, QuantizedLinear(rows, columns, hadamard, device, dtype))
        self.base_grid = None
        if config["patch_size_t"] is None:
            self.base_grid = (
                config["sample_height"] // self.patch_size,
                config["sample_width"] // self.patch_size,
            )

    def _get_rotary_emb(
        self, h: int, w: int, t: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary_table((t, h, w), self.attention_head_dim, self.base_grid, device)


class _Sampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
    """v-prediction on x / sqrt(1 + sigma^2): what CogVideoX predicts, in the terms of the stock samplers."""


class SixBitCogVideoX(comfy.model_base.CogVideoX):
    """The host's CogVideoX around our transformer and noise schedule."""

    def __init__(self, model_config: Any, plan: ModelPlan, device: Any = None) -> None:
        model_config.unet_config["plan"] = plan
        comfy.model_base.BaseModel.__init__(
            self,
            model_config,
            comfy.model_base.ModelType.V_PREDICTION_DDPM,
            device=device,
            unet_model=Transformer,
        )
        self.plan = plan
        self.image_to_video = plan.config["in_channels"] == 2 * plan.config["out_channels"]
        self.model_sampling = _Sampling(model_config)
        self.model_sampling.set_sigmas(sigmas(plan.snr_shift_scale))

    def concat_cond(self, **kwargs: Any) -> torch.Tensor | None:
        """The image latents beside the noise, scaled as the weights were trained."""
        image = kwargs.get("concat_latent_image")
        if image is not None and not self.image_to_video:
            raise ValueError(
                f"{self.plan.label} makes video from text alone; take CogVideoX Image to Video out, or load "
                "an image-to-video model"
            )
        if self.image_to_video and image is None:
            raise ValueError(
                f"{self.plan.label} needs an image; put CogVideoX Image to Video before the sampler"
            )
        if image is not None:  # the host scales in place; what comes belongs to the graph
            square = self.latent_format.scale_factor**2 if self.plan.inverted_image_latents else 1.0
            kwargs["concat_latent_image"] = image / square
        return super().concat_cond(**kwargs)

    def memory_required(self, input_shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
        """Bytes beside the weights for latents (B, C, frames, h, w), as the host estimates them or as what is
        known of the run has it, and those reserved for the delta cache."""
        host = super().memory_required(input_shape, *args, **kwargs)
        return sampling_bytes_of(self, input_shape, running_blocks(), host) + reserved_bytes()

    def apply_model(self, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The denoised latents; at the first noise level those that `schedule.at_terminal` has instead."""
        denoised = super().apply_model(x, t, *args, **kwargs)
        steps = kwargs.get("transformer_options", {}).get("sample_sigmas")
        if steps is None or len(steps) < 2:
            return denoised
        exact = at_terminal(denoised, x, t, steps[1])
        is_first = t >= self.model_sampling.sigma_max * (1 - 1e-6)
        return torch.where(is_first.view(-1, *[1] * (x.ndim - 1)), exact, denoised)
