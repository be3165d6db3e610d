"""A worker process with toy clients: `python -m federation_toy_worker JSON`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from federation_toys import SIZES, toy_endpoint

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.settings import TrainingSettings
from fednl.federation.workers import serve, train_handler


def main() -> None:
    facts = json.loads(sys.argv[1])
    training = TrainingSettings.model_validate(facts["training"])
    inner = toy_endpoint(FedAvg(shared=facts["shared"]), training, facts.get("sizes", SIZES))

    def endpoint(client: str, *rest: Any) -> Any:
        mark = Path(facts["kill"]) if "kill" in facts else None
        if mark is not None and client == "cyd" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        print("a stray print of a client")
        return inner(client, *rest)

    serve({"train": train_handler(endpoint)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
