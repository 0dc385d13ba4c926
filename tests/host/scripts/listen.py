"""A client of a running server: queue a prompt, and keep what its websocket says until the prompt ends."""

import asyncio
import io
import json
import struct
import sys

import aiohttp
from PIL import Image

ARGUMENTS = json.loads(sys.argv[1])
PREVIEW, TEXT = 1, 3  # kinds of the host's binary messages
HERE = "listener"


async def listen(port: int, prompt: dict) -> dict:
    base, found = f"http://127.0.0.1:{port}", {"texts": [], "previews": []}
    how = {"preview_method": "latent2rgb"}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{base}/ws?clientId={HERE}", max_msg_size=0) as socket,
    ):
        body = {"prompt": prompt, "client_id": HERE, "extra_data": how}
        async with session.post(f"{base}/prompt", json=body) as answer:
            key = (await answer.json())["prompt_id"]
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                keep(message.data, found)
            elif message.type == aiohttp.WSMsgType.TEXT:
                event = json.loads(message.data)
                kind, data = event["type"], event.get("data", {})
                if kind.startswith("execution_") and data.get("prompt_id") == key:
                    end = kind.removeprefix("execution_")
                    if end in ("success", "error", "interrupted"):
                        return {**found, "ended": end}
    return found


def keep(data: bytes, found: dict) -> None:
    kind, rest = struct.unpack(">I", data[:4])[0], data[4:]
    if kind == TEXT:
        length = struct.unpack(">I", rest[:4])[0]
        found["texts"].append([rest[4 : 4 + length].decode(), rest[4 + length :].decode()])
    elif kind == PREVIEW:
        image = Image.open(io.BytesIO(rest[4:])).convert("RGB")
        found["previews"].append(image.getpixel((image.width // 2, 8)))  # above whatever moves


print(json.dumps(asyncio.run(listen(ARGUMENTS["port"], ARGUMENTS["prompt"]))))
