"""A custom node of somebody else's, for a test's server: a MODEL that is no CogVideoX, and a short text."""

import comfy.model_patcher
import torch


class Foreign(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = torch.nn.Linear(2, 2)


class ForeignModel:
    INPUT_TYPES = classmethod(lambda cls: {"required": {}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "foreign"

    def make(self) -> tuple:
        cpu = torch.device("cpu")
        return (comfy.model_patcher.ModelPatcher(Foreign(), cpu, cpu),)


class ShortText:
    INPUT_TYPES = classmethod(lambda cls: {"required": {}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "foreign"

    def make(self) -> tuple:
        return ([[torch.zeros(1, 16, 32), {}]],)


NODE_CLASS_MAPPINGS = {"ForeignModel": ForeignModel, "ForeignText": ShortText}
