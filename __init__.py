"""ComfyUI entry point of the 6Bit-Diffusion node pack."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import SixBitExtension  # here, so that the pack imports without ComfyUI

    return SixBitExtension()
