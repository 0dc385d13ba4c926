"""TorchCompileModel before and after the nodes; torch traces the host's model anew for each: slow."""

from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_torch_compile import TorchCompileModel
from graph import DMPQ, cached, check, clean, load, relative, run_checks, sample


@check
def compiling_changes_nothing() -> list[str]:
    bad = []
    for weights in ("as stored", "6-bit"):
        model = load("tiny/", weights)

        def ours(source, weights=weights):
            routed = DMPQ.execute(source, "balanced").args[0] if weights == "6-bit" else source
            return cached(routed)

        plain, expected = sample(model), sample(ours(model))
        before = TorchCompileModel.execute(model, "eager").args[0]
        after = TorchCompileModel.execute(ours(model), "eager").args[0]
        blocks = ours(model)
        keys = [f"diffusion_model.blocks.{index}" for index in range(2)]
        set_torch_compile_wrapper(model=blocks, backend="eager", keys=keys)
        for name, compiled, right in (
            ("before", ours(before), expected),
            ("after", after, expected),
            ("block by block", blocks, expected),
            ("none of ours", before, plain),
            ("before again", ours(before), expected),
        ):
            out = sample(compiled)
            if not relative(out, right) < 1e-5:
                bad.append(f"{weights}, {name}: {relative(out, right)}")
        if not clean(model):
            bad.append(f"{weights}: something is left")
    return bad


run_checks()
