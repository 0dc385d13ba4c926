"""Which clips and latents a CogVideoX can make. Knows no host."""

from dataclasses import dataclass

SPATIAL, TEMPORAL = 8, 4  # of the VAE
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ClipRules:
    """What a model can make.

    Attributes:
        label: of the model, for messages.
        channels: of its latents.
        patch: latent pixels along a patch.
        patch_time: latent frames in a patch.
        only_size: (width, height) in pixels, where a learned position table knows no other.
    """

    label: str
    channels: int
    patch: int = 2
    patch_time: int = 1
    only_size: tuple[int, int] | None = None

    def check_clip(self, width: int, height: int, frames: int) -> None:
        """Refuse a clip that the model cannot make, naming the nearest it can. Raises ValueError."""
        self._check_size(width, height)
        step = 2 * TEMPORAL * self.patch_time
        if frames < 1 or (frames - 1) % step:
            low = max(0, frames - 1) // step * step + 1
            raise ValueError(
                f"{self.label} takes {step}N+1 frames, got {frames}; nearest are {low} and {low + step}"
            )

    def check_latent(self, shape: Shape) -> None:
        """Refuse a latent (B, channels, frames, h, w) of no clip it can make. Raises ValueError."""
        if len(shape) != 5:
            raise ValueError(
                f"{self.label} needs a video latent (B, C, frames, h, w), got {list(shape)}; "
                "use Empty CogVideoX Latent"
            )
        if shape[1] != self.channels:
            raise ValueError(
                f"{self.label} takes latents of {self.channels} channels, got {shape[1]}; use its own VAE"
            )
        self._check_size(shape[4] * SPATIAL, shape[3] * SPATIAL)

    def latent_shape(self, width: int, height: int, frames: int, batch: int = 1) -> Shape:
        """(B, C, latent frames, h, w) of a clip that `check_clip` lets pass."""
        return (batch, self.channels, (frames - 1) // TEMPORAL + 1, height // SPATIAL, width // SPATIAL)

    def _check_size(self, width: int, height: int) -> None:
        if self.only_size and (width, height) != self.only_size:
            only = "{}x{}".format(*self.only_size)
            raise ValueError(f"{self.label} makes clips of {only} only, got {width}x{height}; use {only}")
        step = SPATIAL * self.patch
        near = [max(step, round(side / step) * step) for side in (width, height)]
        if near != [width, height]:
            raise ValueError(
                f"{self.label} takes width and height in multiples of {step}, got {width}x{height}; "
                f"the nearest is {near[0]}x{near[1]}"
            )
