"""Wrong use on a real server, without Triton and diffusers: the answer over HTTP is an error on the node that
is wrong, in one sentence, before anything is sampled, with the nearest valid value where there is one."""

import json
import re
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import save_file

pytest.importorskip("diffusers")
from comfy_server import Host, Server, running_server
from host_cases import VARIANTS, make_transformer, save_pipeline

HERE = Path(__file__).resolve().parent
FOREIGN = "got Foreign; load one with Load 6Bit CogVideoX"
WRONG_PREDICTOR = {
    "format": "sixbit-predictor",
    "version": 1,
    "model": {"family": "cogvideox-5b", "fingerprint": "00"},
    "calibration": {},
    "theta": {},
    "linears": {"blocks.0.q": dict.fromkeys(("alpha", "beta", "r2", "error_nvfp4", "error_int8", "macs"), 1)},
}


@dataclass(frozen=True)
class Use:
    """One wrong use.

    Attributes:
        model: entry of the model list, or "" for a MODEL of somebody else's.
        node: that is wrong; of "latent", "cache", "dmpq", "loader", "sampler", "image".
        said: a part of the sentence.
        queued: whether it can only be seen once the graph runs.
        change: (node, input) -> value, on the graph of `graph`.
    """

    model: str
    node: str
    said: str
    queued: bool = False
    change: tuple[tuple[str, str, object], ...] = ()
    weights: str = "as stored"


def latent(**fields: int) -> tuple[tuple[str, str, object], ...]:
    return tuple(("latent", name, value) for name, value in fields.items())


STOCK_LATENT = (("sampler", "latent_image", ["stock", 0]),)
USES = {
    "a MODEL that is no CogVideoX, to the cache": Use("", "cache", FOREIGN, queued=True),
    "a MODEL that is no CogVideoX, to Apply DMPQ": Use(
        "", "dmpq", "Apply DMPQ needs", True, (("cache", "model", ["dmpq", 0]),)
    ),
    "a MODEL that is no CogVideoX, to the latent": Use(
        "", "latent", FOREIGN, True, (("latent", "model", ["loader", 0]), ("sampler", "model", ["loader", 0]))
    ),
    "a predictor of another model": Use(
        "tiny/",
        "dmpq",
        "the predictor was calibrated on other weights (cogvideox-5b, 00) than this model's",
        queued=True,
        change=(("cache", "model", ["dmpq", 0]), ("dmpq", "predictor", "other.json")),
        weights="6-bit",
    ),
    "a predictor that is not there": Use(
        "tiny/",
        "dmpq",
        "predictor: 'gone.json' not in",
        change=(("cache", "model", ["dmpq", 0]), ("dmpq", "predictor", "gone.json")),
    ),
    "16-bit weights to Apply DMPQ": Use(
        "tiny/",
        "dmpq",
        "Apply DMPQ needs a model with 6-bit weights; load it with Load 6Bit CogVideoX, weights 6-bit",
        queued=True,
        change=(("cache", "model", ["dmpq", 0]),),
    ),
    "image to video without an image": Use(
        "tiny-i2v/", "sampler", "needs an image; put CogVideoX Image to Video before the sampler", queued=True
    ),
    "image to video whose image is not connected": Use(
        "tiny-i2v/", "image", "Required input is missing", change=(("sampler", "positive", ["image", 0]),)
    ),
    "a width that none can make": Use(
        "tiny/", "latent", "got 100; nearest are 96 and 112", change=latent(width=100)
    ),
    "a height that is too large": Use(
        "tiny/", "latent", "got 8192; the nearest is 4096", change=latent(height=8192)
    ),
    "a length that none can make": Use(
        "tiny/",
        "latent",
        "frames must be 8N+1 from 1 to 1025, got 10; nearest are 9 and 17",
        change=latent(frames=10),
    ),
    "a length that 1.5 cannot make": Use(
        "tiny-1.5/", "latent", "takes 16N+1 frames, got 9; nearest are 1 and 17", True, latent(frames=9)
    ),
    "a size of another table": Use(
        "tiny-i2v/", "latent", "makes clips of 96x64 only, got 80x64; use 96x64", True, latent(width=80)
    ),
    "a stock latent of an odd size": Use(
        "tiny/", "sampler", "in multiples of 16, got 72x64; the nearest is 64x64", True, STOCK_LATENT
    ),
    "5B in float16": Use(
        "half.safetensors", "loader", "overflows in float16 and gives a black clip; use its bfloat16"
    ),
    "a file cut short": Use("truncated.safetensors", "loader", "truncated.safetensors is cut short at"),
    "a lone shard": Use("lone.safetensors", "loader", "is missing; download the checkpoint again"),
    "a model that is not there": Use("gone.safetensors", "loader", "there is no model gone.safetensors"),
    "a cache that ends before it starts": Use(
        "tiny/",
        "cache",
        "start and end need 0 <= start < end <= 1, got 0.9 and 0.2",
        change=(("cache", "start", 0.9), ("cache", "end", 0.2)),
    ),
}


def make_models(folder: Path) -> None:
    """Good pipelines of three kinds, and files that are wrong in one way each."""
    models = folder / "diffusion_models"
    for entry, name in (("tiny", "5b"), ("tiny-1.5", "1.5"), ("tiny-i2v", "5b-i2v")):
        save_pipeline(VARIANTS[name], make_transformer(VARIANTS[name]), models / entry)
        (models / entry / "model_index.json").write_text("{}")
    whole = make_transformer(VARIANTS["5b"])
    state = whole.state_dict()
    save_file({name: tensor.half() for name, tensor in state.items()}, models / "half.safetensors")
    save_file(state, models / "truncated.safetensors")
    raw = (models / "truncated.safetensors").read_bytes()
    (models / "truncated.safetensors").write_bytes(raw[: len(raw) // 2])
    whole.save_pretrained(folder / "shards", max_shard_size="200KB")
    shard = sorted((folder / "shards").glob("*.safetensors"))[0]
    (models / "lone.safetensors").write_bytes(shard.read_bytes())
    (folder / "sixbit_predictors").mkdir()
    (folder / "sixbit_predictors" / "other.json").write_text(json.dumps(WRONG_PREDICTOR))


@pytest.fixture(scope="module")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("server") / "base"
    nodes = {"foreign.py": (HERE / "foreign_nodes.py").read_text(encoding="utf-8")}
    with running_server(host, base, make_models, nodes) as server:
        yield server


def graph(use: Use) -> dict:
    """Loader, latent, cache and sampler, with the change of a use; what nothing reads is left out."""
    loader = {"class_type": "ForeignModel", "inputs": {}}
    if use.model:
        inputs = {"model_name": use.model, "weights": use.weights}
        loader = {"class_type": "SixBitLoadCogVideoX", "inputs": inputs}
    size = {"width": 96, "height": 64, "frames": 17}
    nodes = {
        "loader": loader,
        "reference": {"class_type": "SixBitLoadReference", "inputs": {}},
        "text": {"class_type": "ForeignText", "inputs": {}},
        "dmpq": {"class_type": "SixBitApplyDMPQ", "inputs": {"model": ["loader", 0], "preset": "balanced"}},
        "cache": {
            "class_type": "SixBitTemporalDeltaCache",
            "inputs": {"model": ["loader", 0], "preset": "balanced"},
        },
        "latent": {
            "class_type": "SixBitEmptyLatent",
            "inputs": {"model": ["loader" if use.model else "reference", 0], **size, "batch_size": 1},
        },
        "image": {
            "class_type": "SixBitImageToVideo",
            "inputs": {"positive": ["text", 0], "negative": ["text", 0], "vae": ["reference", 2], **size},
        },
        "stock": {
            "class_type": "EmptyHunyuanLatentVideo",
            "inputs": {"width": 72, "height": 64, "length": 9, "batch_size": 1},
        },
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["cache", 0],
                "positive": ["text", 0],
                "negative": ["text", 0],
                "latent_image": ["latent", 0],
                "seed": 0,
                "steps": 2,
                "cfg": 6.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "saved": {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "x"}},
    }
    for node, name, value in use.change:
        nodes[node]["inputs"][name] = value
    return {key: nodes[key] for key in needed("saved", nodes)}


def needed(key: str, nodes: dict) -> list[str]:
    """A node and all that it reads."""
    links = [value[0] for value in nodes[key]["inputs"].values() if isinstance(value, list)]
    return list(dict.fromkeys([key, *(name for link in links for name in needed(link, nodes))]))


def refused(server: Server, prompt: dict) -> tuple[str, str]:
    """Node and words of a prompt that must not be queued."""
    with pytest.raises(urllib.error.HTTPError) as error:
        server.ask("prompt", {"prompt": prompt})
    assert error.value.code == 400
    found = json.load(error.value)["node_errors"]
    ((node, entry),) = found.items()
    (line,) = {words(error) for error in entry["errors"]}  # the host repeats ours for each field
    return node, line


def words(error: dict) -> str:
    """What a validation says: our sentence, or the host's own."""
    _, dash, sentence = error["details"].partition(" - ")
    return sentence if dash else f"{error['message']}: {error['details']}"


def failed(server: Server, prompt: dict) -> tuple[str, str]:
    """Node and words of the error that a queued prompt ends with."""
    status = server.outcome(prompt)["status"]
    assert status["status_str"] == "error"
    told = dict(status["messages"])["execution_error"]
    assert "sampler" not in told["executed"] and "saved" not in told["executed"]
    return told["node_id"], told["exception_message"].strip()


def sampled(server: Server) -> bool:
    """Whether the log has a bar of a sampler that got further than its start."""
    return re.search(r"[1-9]\d*%\|", (server.base / "log.txt").read_text()) is not None


@pytest.mark.parametrize("name", USES)
def test_wrong_use_is_an_error_on_its_node(server: Server, name: str) -> None:
    use = USES[name]
    node, line = (failed if use.queued else refused)(server, graph(use))
    assert node == use.node and use.said in line and "\n" not in line
    assert not sampled(server)


def test_right_use_runs_without_triton_and_says_so(server: Server) -> None:
    """Last: it samples."""
    assert server.execute(graph(Use("tiny/", "", "")))["saved"]["latents"]
    said = [
        line
        for line in (server.base / "log.txt").read_text().splitlines()
        if "6Bit: activations as they come" in line
    ]
    assert sampled(server) and "Triton is not installed" in said[-1]
