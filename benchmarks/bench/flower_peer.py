"""Rounds of `peer_work` by Flower's simulation: FedAvg, two actors of one CPU each.

    FLOWER_PYTHON -m benchmarks.bench.flower_peer FOLDER ROUNDS

Prints the seconds of each round as a JSON list on the last line. It runs in an environment of its own
(``make bench-peers``), which has flwr and Ray, and of the project only this file and `peer_work`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.bench.peer_work import Users, network, train_user
from dataset import process

FOLDER = "PEER_WORK"
"""The environment variable that tells the actors where the users' images are."""
client = ClientApp()


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """One user's local training."""
    torch.set_num_threads(1)
    users = Users(Path(os.environ[FOLDER]))
    model = network(users.work)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    user = int(context.node_config["partition-id"])
    count = train_user(model, users, user, int(message.content["config"]["server-round"]))
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": count})}
    )
    return Message(content=content, reply_to=message)


def main(folder: str, rounds: str) -> None:
    """Run, and print."""
    process.imported()
    os.environ[FOLDER] = folder
    users, times = Users(Path(folder)), list[float]()
    server = ServerApp()

    def at_the_end_of_a_round(number: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(time.perf_counter())
        return MetricRecord({"round": number})

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        share = users.work.cohort / len(users)
        strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=len(users))
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network(users.work).state_dict()),
            num_rounds=int(rounds),
            evaluate_fn=at_the_end_of_a_round,
        )

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, num_supernodes=len(users), backend_config=resources)
    print(json.dumps([after - before for before, after in pairwise(times)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
