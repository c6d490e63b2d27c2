"""Serve the best checkpoint of a run of examples/train.py over HTTP, with Ray Serve.

pip install 'distributed-trainer[serve]'
python examples/train.py
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)  # else Ray's own ports take work from anybody
python examples/serve.py runs/train-...
curl -d '{"images": [[[0, 0, 5, ...], ...]]}' http://127.0.0.1:8000/
"""

import argparse
import signal
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from train import net

from distributed import load_weights


@serve.deployment
class Digits:
    """Answer a POST of `{"images": [...]}`, each image 8 rows of 8 numbers from 0 to 16, with the digit of each."""

    def __init__(self, run: str) -> None:
        self.model = net().eval()
        self.checkpoint = load_weights(self.model, run).source.name

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.005)
    async def classify(self, images: list[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the answer to each request. Ray Serve passes requests that arrive together in one call."""
        with torch.no_grad():
            scores = self.model(torch.cat(images) / 16).softmax(1)
        parts = scores.split([len(each) for each in images])
        return [{"digits": p.argmax(1).tolist(), "probabilities": p.amax(1).tolist()} for p in parts]

    async def __call__(self, request: Request) -> Response:
        try:
            images = torch.tensor((await request.json())["images"], dtype=torch.float32).reshape(-1, 1, 8, 8)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"send {{'images': [8 rows of 8 numbers, ...]}}: {error}"}, status_code=400)
        answer = await self.classify(images)
        return JSONResponse({"checkpoint": self.checkpoint, **answer})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a run directory of examples/train.py, or one of its checkpoints")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    ray.init(include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    serve.run(Digits.bind(str(Path(given.run).absolute())))
    print(f"serving {given.run} at http://127.0.0.1:{given.port}/", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
