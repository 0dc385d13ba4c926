"""One sampling run of the host under `RunState`, by four wrappers.

OUTER_SAMPLE opens the run and closes it in `finally`; PREPARE_SAMPLING has the host keep room for the delta
cache when it loads the weights; CALC_COND_BATCH sees to it that no two conditionings have one name;
DIFFUSION_MODEL says, at each call of the model, who is in the batch.
"""

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy_api.torch_helpers.torch_compile import TORCH_COMPILE_KWARGS

from ..kernels import tuning
from ..sixbit_core.config import DeltaCacheConfig
from ..sixbit_core.layout import Stream
from ..sixbit_core.predictor import Predictor
from ..sixbit_core.report import RunMemory, spelled_bytes
from ..sixbit_core.run import RunState
from . import schedule
from .conditionings import evaluated, longest_text
from .demand import BlockMemory, Demand
from .machine import default_dmpq, path_of
from .memory import block_memory, bytes_in_16_bits, demand_of, peak_bytes, reset_peak, room_for_cache
from .predictors import mismatch
from .progress_text import StepText, executing_node, text_channel
from .reserve import reserved, running
from .sampling import sampling_beside
from .settings import Entry, Settings, mark_of, settings_in
from .status import status_line
from .swap import deciding, hooked, layout

RUN = "sixbit_run"
_STEP_CACHE = "easycache"  # of the host, Lazy or not


@dataclass(frozen=True)
class ActiveRun:
    """A run under way.

    Attributes:
        decides: over the blocks; else it only counts and times evaluations of the model as it is.
        last_sigma: noise level of its last evaluation.
        cache_bytes: that the delta cache may take on the device.
        compiler: arguments of torch.compile, where the whole model was to be compiled.
        blocks: what is known of their memory; None where the model runs as it is.
    """

    state: RunState
    decides: bool
    last_sigma: float = 0.0
    cache_bytes: int = 0
    compiler: dict[str, Any] | None = None
    blocks: BlockMemory | None = None


def outer_sample(
    executor: Any,
    noise: torch.Tensor,
    latent_image: torch.Tensor,
    sampler: Any,
    sigmas: torch.Tensor,
    denoise_mask: torch.Tensor | None = None,
    callback: Callable | None = None,
    disable_pbar: bool = False,
    seed: int | None = None,
    **rest: Any,
) -> torch.Tensor:
    """OUTER_SAMPLE wrapper: one `RunState` for one sampling run, gone when it ends, however it ends."""
    guider = executor.class_obj
    original, patcher, device = guider.model_options, guider.model_patcher, guider.model_patcher.load_device
    settings = settings_in(original)
    options = comfy.model_patcher.create_model_options_clone(original)
    asked = settings.dmpq is not None or settings.cache is not None
    if patcher.get_additional_models_with_key("multigpu"):
        if asked:
            raise ValueError(
                "the 6Bit nodes decide for one GPU; take the node that spreads sampling over several out"
            )
        logging.info("6Bit: sampling is spread over several GPUs, activations stay as they come")
        return executor(
            noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed, **rest
        )
    dmpq = settings.dmpq
    if dmpq is None and settings.six_bit:
        dmpq = default_dmpq(path_of(device))
    if dmpq is not None or settings.cache is not None:
        run = _deciding(guider, replace(settings, dmpq=dmpq), noise, sampler, sigmas)
    else:
        run = _counting(guider, noise)
    text = StepText(run.state, None if disable_pbar else text_channel())
    options["transformer_options"][RUN] = run
    guider.model_options = options
    reset_peak(device)
    try:
        shown = text.after(callback)
        with running(run.blocks), tuning(dmpq is not None and dmpq.tune, _tell_tuning):
            result = executor(
                noise, latent_image, sampler, sigmas, denoise_mask, shown, disable_pbar, seed, **rest
            )
        run.state.finish()
        text.end()
        entry = Entry(run.state.report(), _memory(patcher), mark_of(result))
        settings.journal.keep(executing_node(), entry)
        return result
    finally:
        options["transformer_options"].pop(RUN, None)
        guider.model_options = original
        run.state.close()
        text.stop()


def _deciding(
    guider: Any, settings: Settings, noise: torch.Tensor, sampler: Any, sigmas: torch.Tensor
) -> ActiveRun:
    """The run that the nodes asked for; what cannot be is refused, what is about to happen is said."""
    patcher, options = guider.model_patcher, guider.model_options
    if settings.cache is not None and options.get("context_handler") is not None:
        raise ValueError(
            "Temporal Delta Cache cannot tell context windows apart; take one of the two out of the graph"
        )
    if settings.dmpq is not None and settings.dmpq.router != "bf16" and _compiler(options) is not None:
        logging.warning("6Bit: blocks whose activations are routed run uncompiled")
    if _STEP_CACHE in options["transformer_options"]:
        logging.warning(
            f"6Bit: {_STEP_CACHE} skips whole evaluations that the delta cache never sees; use one of the two"
        )
    compiler = _compiler(options)
    text = longest_text(guider) or patcher.model.diffusion_model.max_text_seq_length
    cached = settings.cache is not None
    blocks = block_memory(patcher, options, settings.dmpq, cached, compiler is not None, text)
    demand = demand_of(patcher, noise.shape, evaluated(guider), blocks)
    cache = _placed(settings.cache, demand, patcher)
    modules = patcher.model.diffusion_model.blocks
    state = RunState(layout(modules), settings.dmpq, cache, settings.predictor, sums=not hooked(modules))
    if state.note:
        logging.info(f"6Bit: {state.note}")
    if line := _unlike_calibration(state, settings.predictor, guider, noise.shape, sampler, sigmas):
        logging.warning(f"6Bit: {line}")
    free = comfy.model_management.get_free_memory(patcher.load_device)
    logging.info(status_line(patcher.load_device, state.dmpq, cache, demand, free))
    last_sigma = float(sigmas[-2]) if len(sigmas) > 1 else float(sigmas[-1])
    held = 0 if cache is None else demand.cache_on_gpu(cache.location)
    return ActiveRun(state, True, last_sigma, held, compiler, blocks)


def _counting(guider: Any, noise: torch.Tensor) -> ActiveRun:
    """A run that leaves the model as it is."""
    patcher = guider.model_patcher
    demand = demand_of(patcher, noise.shape, evaluated(guider))
    free = comfy.model_management.get_free_memory(patcher.load_device)
    logging.info(status_line(patcher.load_device, None, None, demand, free))
    return ActiveRun(RunState(layout(patcher.model.diffusion_model.blocks)), decides=False)


def _memory(patcher: Any) -> RunMemory:
    """What the run took. Weights that the host streams in by itself are not in what torch counts."""
    weights = patcher.model_size()
    whole = patcher.loaded_size() >= weights
    peak = None if patcher.is_dynamic() else peak_bytes(patcher.load_device)
    return RunMemory(weights, bytes_in_16_bits(patcher.model), peak, weights_on_device=whole)


def _tell_tuning(what: str, number: int, candidates: int) -> None:
    if number == 1:
        logging.info(f"6Bit: tuning {what}, {candidates} candidates")


def _unlike_calibration(
    state: RunState,
    predictor: Predictor | None,
    guider: Any,
    shape: Sequence[int],
    sampler: Any,
    sigmas: torch.Tensor,
) -> str | None:
    """What of the run is not as its thresholds were solved for; other routers have none."""
    if predictor is None or state.dmpq is None or state.dmpq.router != "gamma":
        return None
    scheduler = sampling_beside(predictor.calibration.get("scheduler"), guider.model_patcher, sampler, sigmas)
    cfg = getattr(guider, "cfg", None)  # of other guiders it may be anything
    cfg = cfg if isinstance(cfg, int | float) else None
    return mismatch(predictor, len(sigmas) - 1, shape, cfg, scheduler)


def _compiler(model_options: dict) -> dict[str, Any] | None:
    """What the host's compile node asked for, if it did. torch took the guard filter out of the options."""
    asked = model_options.get(TORCH_COMPILE_KWARGS)
    if asked is None:
        return None
    return {**asked, "options": {**(asked["options"] or {}), "guard_filter_fn": _lasting_guards}}


def _lasting_guards(guards: list) -> list[bool]:
    """Not on transformer_options, which are new at every step."""
    return ["transformer_options" not in guard.name for guard in guards]


def _placed(cache: DeltaCacheConfig | None, demand: Demand, patcher: Any) -> DeltaCacheConfig | None:
    """The cache's settings with location "auto" settled for the memory at hand.

    Raises:
        ValueError: residuals would wait in host memory, and there is too little.
    """
    if cache is None:
        return None
    free = comfy.model_management.get_free_memory(torch.device("cpu"))
    location = demand.place(cache.location, room_for_cache(patcher, demand), free // 2)
    needed = demand.cache_in_host_memory(location)
    if needed > free:
        raise ValueError(
            f"Temporal Delta Cache needs {spelled_bytes(needed)} of host memory for this clip and "
            f"{spelled_bytes(free)} are free; set cache_location to gpu-nvfp4, or make the clip smaller"
        )
    return replace(cache, location=location)


def prepare_sampling(executor: Any, *args: Any, model_options: dict | None = None, **kwargs: Any) -> Any:
    """PREPARE_SAMPLING wrapper: the host loads the weights beside the delta cache to come."""
    run: ActiveRun | None = (model_options or {}).get("transformer_options", {}).get(RUN)
    with reserved(0 if run is None else run.cache_bytes):
        return executor(*args, model_options=model_options, **kwargs)


def calc_cond_batch(executor: Any, model: Any, conds: list, *args: Any, **kwargs: Any) -> Any:
    """CALC_COND_BATCH wrapper: where areas are used the host copies a conditioning, its uuid included."""
    seen = set()
    for cond in (cond for group in conds for cond in group or ()):
        if cond["uuid"] in seen:
            cond["uuid"] = uuid.uuid4()  # stays for the run: these dicts are the run's own
        seen.add(cond["uuid"])
    return executor(model, conds, *args, **kwargs)


@torch.compiler.disable(recursive=False)
def diffusion_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """DIFFUSION_MODEL wrapper: one call of the model under the run."""
    options = kwargs.get("transformer_options") or next(a for a in reversed(args) if isinstance(a, dict))
    run: ActiveRun | None = options.get(RUN)
    if run is not None and run.decides:
        return _under(run, options, executor, args, kwargs)
    if run is not None:
        _count(run.state, options, args[0].shape[0])
    return executor(*args, **kwargs)


@torch.compiler.disable
def _count(state: RunState, options: dict, batch: int) -> None:
    """A call of a model that runs as it is: no number is read from the device, so that nothing waits. A
    conditioning that comes again begins the next evaluation."""
    state.begin_call(list(dict.fromkeys(streams_of(options, batch))), 0.0, 0.0, False)
    state.ran_untouched()


@torch.compiler.disable
def _under(run: ActiveRun, options: dict, executor: Any, args: tuple, kwargs: dict) -> Any:
    x, timestep = args[0], args[1]
    sigma, time = torch.stack([options["sigmas"][0].float(), timestep[0].float()]).tolist()
    last = sigma <= run.last_sigma * (1 + 1e-6)
    run.state.begin_call(streams_of(options, x.shape[0]), sigma, schedule.progress(time), last)
    with deciding(run.state, executor.class_obj.blocks, run.compiler):
        return executor(*args, **kwargs)


def streams_of(options: dict, batch: int) -> list[Stream]:
    """Names of the batch rows: conditionings in the host's order, latents within each."""
    names = [str(name) for name in options["uuids"]]
    items, rest = divmod(batch, len(names))
    if rest:
        raise ValueError(f"a batch of {batch} rows cannot hold {len(names)} conditionings of one size")
    return [(name, item) for name in names for item in range(items)]
