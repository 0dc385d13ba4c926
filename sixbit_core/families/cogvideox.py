"""CogVideoX: the five published transformers, and any other of the same architecture.

Source of the shapes and defaults: diffusers' `CogVideoXTransformer3DModel` and the
configurations published with the weights. One entry of the table per release; what is
not in the table (the bundled reference, test models) is "cogvideox-small", whose sizes
are read from its tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .base import ModelFamily, Shape, Source

_LINEARS = ("q", "k", "v", "attn_out", "ff_proj", "ff_out")


@dataclass(frozen=True, kw_only=True)
class CogVideoXFamily(ModelFamily):
    """A CogVideoX transformer.

    Attributes:
        heads, head_dim: of the attention; the width is their product.
        in_channels, out_channels: latent channels; twice as many in as out for image-to-video.
        patch_size, patch_size_t: patch in space and time; no patch in time before 1.5 (None).
        time_embed_dim, text_embed_dim, ofs_embed_dim: widths of the embeddings; no "ofs" if None.
        rotary: rotary positions; False for a sincos table; None where tensors cannot tell.
        learned_positions: a position table is part of the checkpoint.
        sample_size: (height, width) of the latent in the published configuration.
    """

    heads: int = 0
    head_dim: int = 64
    in_channels: int = 16
    out_channels: int = 16
    patch_size: int = 2
    patch_size_t: int | None = None
    time_embed_dim: int = 512
    text_embed_dim: int = 4096
    ofs_embed_dim: int | None = None
    rotary: bool | None = None
    learned_positions: bool = False
    sample_size: tuple[int, int] | None = None
    linears: tuple[str, ...] = _LINEARS
    shared_input: tuple[str, ...] = ("q", "k", "v")
    sources: tuple[tuple[str, Source], ...] = (
        ("q", Source("norm1")),
        ("attn_out", Source("norm1", "v")),
        ("ff_proj", Source("norm2")),
        ("ff_out", Source("norm2", "ff_proj", gelu=True)),
    )
    modulation: tuple[str, ...] = ("norm1.linear", "norm2.linear")
    top_modulation: tuple[str, ...] = ("norm_out.linear",)
    block_renames: tuple[tuple[str, str], ...] = (
        ("attn1.to_q", "q"),
        ("attn1.to_k", "k"),
        ("attn1.to_v", "v"),
        ("attn1.to_out.0", "attn_out"),
        ("attn1.norm_q", "norm_q"),
        ("attn1.norm_k", "norm_k"),
        ("ff.net.0.proj", "ff_proj"),
        ("ff.net.2", "ff_out"),
    )
    top_renames: tuple[tuple[str, str], ...] = (
        ("time_embedding.linear_1", "time_embedding_linear_1"),
        ("time_embedding.linear_2", "time_embedding_linear_2"),
        ("ofs_embedding.linear_1", "ofs_embedding_linear_1"),
        ("ofs_embedding.linear_2", "ofs_embedding_linear_2"),
    )

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    @property
    def image_to_video(self) -> bool:
        """Whether an image latent is concatenated to the noise."""
        return self.in_channels == 2 * self.out_channels

    def tensor_shapes(self) -> dict[str, Shape]:
        """See `ModelFamily.tensor_shapes`."""
        width, time = self.width, self.time_embed_dim
        volume = self.patch_size**2 * (self.patch_size_t or 1)
        shapes: dict[str, Shape] = {}
        if self.patch_size_t is None:
            patch = (self.patch_size, self.patch_size)
            shapes["patch_embed.proj.weight"] = (width, self.in_channels, *patch)
            shapes["patch_embed.proj.bias"] = (width,)
        else:
            shapes["patch_embed.proj.weight"] = (width, self.in_channels * volume)
        if self.learned_positions:
            shapes["patch_embed.pos_embedding"] = (1, -1, width)
        _linear(shapes, "patch_embed.text_proj", width, self.text_embed_dim)
        _linear(shapes, "time_embedding_linear_1", time, width)
        _linear(shapes, "time_embedding_linear_2", time, time)
        if self.ofs_embed_dim:
            _linear(shapes, "ofs_embedding_linear_1", self.ofs_embed_dim, self.ofs_embed_dim)
            _linear(shapes, "ofs_embedding_linear_2", self.ofs_embed_dim, self.ofs_embed_dim)
        for n in range(self.layers):
            block = f"{self.blocks}.{n}"
            for norm in ("norm1", "norm2"):
                _linear(shapes, f"{block}.{norm}.linear", 6 * width, time)
                _norm(shapes, f"{block}.{norm}.norm", width)
            _norm(shapes, f"{block}.norm_q", self.head_dim)
            _norm(shapes, f"{block}.norm_k", self.head_dim)
            for kind in ("q", "k", "v", "attn_out"):
                _linear(shapes, f"{block}.{kind}", width, width)
            _linear(shapes, f"{block}.ff_proj", 4 * width, width)
            _linear(shapes, f"{block}.ff_out", width, 4 * width)
        _norm(shapes, "norm_final", width)
        _linear(shapes, "norm_out.linear", 2 * width, time)
        _norm(shapes, "norm_out.norm", width)
        _linear(shapes, "proj_out", volume * self.out_channels, width)
        return shapes

    def optional_shapes(self) -> dict[str, Shape]:
        """The bias of a Linear patch embedding, and a sincos table someone stored."""
        shapes: dict[str, Shape] = {}
        if self.patch_size_t is not None:
            shapes["patch_embed.proj.bias"] = (self.width,)
        if not self.learned_positions and not self.rotary:
            shapes["patch_embed.pos_embedding"] = (1, -1, self.width)
        return shapes

    def diffusers_config(self, shapes: Mapping[str, Shape]) -> dict[str, object]:
        """See `ModelFamily.diffusers_config`. What tensors cannot tell (positions and sample
        size of a "cogvideox-small") is left out: merge the checkpoint's own configuration over it."""
        config: dict[str, object] = {
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_dim,
            "num_layers": self.layers,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "patch_size": self.patch_size,
            "patch_size_t": self.patch_size_t,
            "patch_bias": self.patch_size_t is None,
            "time_embed_dim": self.time_embed_dim,
            "text_embed_dim": self.text_embed_dim,
            "ofs_embed_dim": self.ofs_embed_dim,
            "attention_bias": f"{self.blocks}.0.q.bias" in shapes,
            "use_learned_positional_embeddings": self.learned_positions,
        }
        if self.rotary is not None:
            config["use_rotary_positional_embeddings"] = self.rotary
        if self.sample_size is not None:
            config["sample_height"], config["sample_width"] = self.sample_size
        if self.frames is not None:
            config["sample_frames"] = self.frames
        return config


def _linear(shapes: dict[str, Shape], name: str, out_features: int, in_features: int) -> None:
    shapes[f"{name}.weight"] = (out_features, in_features)
    shapes[f"{name}.bias"] = (out_features,)


def _norm(shapes: dict[str, Shape], name: str, width: int) -> None:
    shapes[f"{name}.weight"] = (width,)
    shapes[f"{name}.bias"] = (width,)


_5B = CogVideoXFamily(
    name="cogvideox-5b",
    label="CogVideoX-5B",
    layers=42,
    heads=48,
    licence="CogVideoX licence",
    size=(480, 720),
    sample_size=(60, 90),
    frames=49,
    snr_shift_scale=1.0,
    vae_scaling_factor=0.7,
    rotary=True,
)
_15 = replace(
    _5B,
    name="cogvideox-1.5-5b",
    label="CogVideoX1.5-5B",
    patch_size_t=2,
    size=(768, 1360),
    sample_size=(300, 300),  # as published: the largest grid, not the size of a clip
    frames=81,
    frame_step=16,
)
PUBLISHED: tuple[CogVideoXFamily, ...] = (
    CogVideoXFamily(
        name="cogvideox-2b",
        label="CogVideoX-2B",
        layers=30,
        heads=30,
        native_dtype="float16",
        licence="Apache-2.0",
        size=(480, 720),
        sample_size=(60, 90),
        frames=49,
        snr_shift_scale=3.0,
        vae_scaling_factor=1.15258426,
        rotary=False,
    ),
    _5B,
    replace(_5B, name="cogvideox-5b-i2v", label="CogVideoX-5B-I2V", in_channels=32, learned_positions=True),
    _15,
    replace(_15, name="cogvideox-1.5-5b-i2v", label="CogVideoX1.5-5B-I2V", in_channels=32, ofs_embed_dim=512),
)
SMALL = CogVideoXFamily(name="cogvideox-small", label="small CogVideoX")
_MARKS = ("patch_embed.proj.weight", "patch_embed.text_proj.weight", "proj_out.weight")


def detect(shapes: Mapping[str, Shape]) -> CogVideoXFamily | None:
    """The family of a checkpoint with these native names and shapes, None if it is no CogVideoX.

    Raises:
        ValueError: it is one, but a tensor that decides the variant is missing or misshapen,
            or the combination was never published.
    """
    blocks = sorted({int(m[1]) for name in shapes if (m := re.match(r"blocks\.(\d+)\.", name))})
    if blocks and blocks[-1] >= len(shapes):
        raise ValueError(f"blocks.{blocks[-1]} cannot be among {len(shapes)} tensors; download it again")
    modulation = next((s for n in blocks if (s := shapes.get(f"blocks.{n}.norm1.linear.weight"))), None)
    head = next((s for n in blocks if (s := shapes.get(f"blocks.{n}.norm_q.weight"))), None)
    if modulation is None or head is None or not any(mark in shapes for mark in _MARKS):
        return None
    for mark in _MARKS:
        if mark not in shapes:
            raise ValueError(f"{mark} is missing; download the checkpoint again")
    patch, text, out = (shapes[mark] for mark in _MARKS)
    if len(modulation) != 2 or len(text) != 2 or len(out) != 2 or len(patch) not in (2, 4) or len(head) != 1:
        raise ValueError("the tensors have CogVideoX names but other ranks; this is another architecture")
    time_patch = 2 if len(patch) == 2 else None
    space = patch[2] if len(patch) == 4 else 2
    volume = space**2 * (time_patch or 1)
    found = replace(
        SMALL,
        layers=blocks[-1] + 1,
        heads=modulation[0] // 6 // head[0],
        head_dim=head[0],
        in_channels=patch[1] if time_patch is None else patch[1] // volume,
        out_channels=out[0] // volume,
        patch_size=space,
        patch_size_t=time_patch,
        time_embed_dim=modulation[1],
        text_embed_dim=text[1],
        ofs_embed_dim=shapes.get("ofs_embedding_linear_1.weight", (None,))[0],
        learned_positions="patch_embed.pos_embedding" in shapes,
    )
    alike = [f for f in PUBLISHED if (f.heads, f.head_dim) == (found.heads, found.head_dim)]
    if not alike or found.text_embed_dim != alike[0].text_embed_dim:
        return found
    for family in alike:
        if (family.in_channels, family.patch_size_t) == (found.in_channels, found.patch_size_t):
            return family
    known = ", ".join(f"{f.label} {f.in_channels}" for f in alike)
    raise ValueError(
        f"{found.width} channels with {found.in_channels} input channels is no known CogVideoX "
        f"(input channels: {known}); variants such as control or inpainting models are not supported"
    )
