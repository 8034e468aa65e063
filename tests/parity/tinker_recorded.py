"""Run a loop of tinker-cookbook and record its data and results: python tinker_recorded.py MODULE FILE [KEY=VALUE ...]."""

import importlib
import itertools
import json
import sys

import chz
import tinker
from tinker.lib.public_interfaces.training_client import TrainingClient


def main() -> None:
    module, out = sys.argv[1:3]
    del sys.argv[1:3]
    recorded = []
    create, run = tinker.ServiceClient.create_lora_training_client, TrainingClient._run_fwd_bwd

    def created(self, *given, **named):
        client = create(self, *given, **named)
        recorded.append({"start": client.save_state("start").result().path})
        return client

    def ran(self, requests, loss_fn, *given, **named):
        future = run(self, requests, loss_fn, *given, **named)
        data = [datum for request in requests for datum in request.data]
        result = future.result()
        recorded.append(
            {
                "loss_fn": loss_fn,
                "data": [
                    {
                        "tokens": datum.model_input.to_ints(),
                        "inputs": {name: value.tolist() for name, value in datum.loss_fn_inputs.items()},
                        "logprobs": output["logprobs"].tolist(),
                    }
                    for datum, output in zip(data, result.loss_fn_outputs, strict=True)
                ],
                "loss": result.metrics["loss:sum"],
            }
        )
        return future

    tinker.ServiceClient.create_lora_training_client = created
    TrainingClient._run_fwd_bwd = ran
    loop = importlib.import_module(f"tinker_cookbook.recipes.{module}")
    if hasattr(loop, "get_reward"):
        # A random model gives no right answer, and a group of equal rewards is left out: every second response is right.
        rewards = itertools.cycle([0.0, 1.0])
        loop.get_reward = lambda response, answer: next(rewards)
    chz.nested_entrypoint(loop.main)
    with open(out, "w") as file:
        json.dump(recorded, file)


if __name__ == "__main__":
    main()
