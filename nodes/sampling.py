"""Whether a run samples as a predictor's file says. An extra: on a host that has changed nothing is said."""

from typing import Any

import torch

from .host_contract import SAMPLING_SEAMS, mismatches

_SAME = {"ddim-trailing": "euler simple"}  # the engine's, step by step what the host's are


def sampling_beside(calibrated: object, patcher: Any, sampler: Any, sigmas: torch.Tensor) -> str | None:
    """Sampler and schedule of a run in the words of a predictor's file, for comparing with those.

    Args:
        calibrated: what the file says, as "euler simple".
        patcher: the MODEL.
        sampler, sigmas: of the run, as the host hands them on.

    Returns:
        `calibrated` itself where the run is like it; None where that is not known, as in some of the steps.
    """
    if not isinstance(calibrated, str) or mismatches(SAMPLING_SEAMS):
        return None
    from comfy.samplers import KSampler, sampler_object

    name, _, scheduler = _SAME.get(calibrated, calibrated).partition(" ")
    known = name in KSampler.SAMPLERS and scheduler in KSampler.SCHEDULERS
    own = _function_name(sampler)
    if not known or own is None or len(sigmas) < 2:
        return None
    like_it = _function_name(sampler_object(name)) == own
    expected = KSampler(patcher, len(sigmas) - 1, sigmas.device, sampler=name, scheduler=scheduler).sigmas
    if expected.shape == sigmas.shape and torch.allclose(expected, sigmas, rtol=1e-4):
        return calibrated if like_it else f"{_sampler_named(own)} {scheduler}"
    if not torch.isclose(expected[0], sigmas[0], rtol=1e-4) or sigmas[-1] > 0:  # some of the steps
        return None if like_it else _sampler_named(own)
    return f"{_sampler_named(own)} on another schedule"


def _function_name(sampler: Any) -> str | None:
    """Of the function that a sampler of the host steps with; "ddim" has euler's."""
    return getattr(getattr(sampler, "sampler_function", None), "__name__", None)


def _sampler_named(function: str) -> str:
    return function.removeprefix("sample_").removesuffix("_function")
