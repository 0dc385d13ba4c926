"""Which clips and latents a CogVideoX can make. Knows no host."""

from dataclasses import dataclass

SPATIAL, TEMPORAL = 8, 4  # of the VAE
SIDES = range(16, 4097, 2 * SPATIAL)  # of a clip in pixels: what any CogVideoX can make, and nodes offer
FRAMES = range(1, 1026, 2 * TEMPORAL)
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


def check_fields(width: object, height: object, frames: object) -> bool | str:
    """True, or one line on what no CogVideoX makes, naming the nearest that one does.

    For the host's validation, before any model is loaded; what only some models make passes.

    Args:
        width, height, frames: as typed; None where another node gives it. What is no whole number the host
            refuses by itself.
    """
    sides, count = f"a multiple of {SIDES.step}", f"{FRAMES.step}N+1"
    for name, value, fit, rule in (
        ("width", width, SIDES, sides),
        ("height", height, SIDES, sides),
        ("frames", frames, FRAMES, count),
    ):
        if isinstance(value, int) and value not in fit:
            return f"{name} must be {rule} from {fit[0]} to {fit[-1]}, got {value}; {_nearest(value, fit)}"
    return True


def _nearest(value: int, fit: range) -> str:
    beside = [str(number) for number in fit if abs(number - value) < fit.step]
    if len(beside) == 2:
        return f"nearest are {' and '.join(beside)}"
    return f"the nearest is {fit[0] if value < fit[0] else fit[-1]}"
