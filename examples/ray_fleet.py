"""Two engines, their router and a trainer as actors of Ray, on this machine.

pip install 'segue[ray]' openai
python examples/ray_fleet.py              # the bundled model, or the path or hub id of another one

It trains for a step, sends the weights to both engines, and kills one of them in the middle of a reply.
"""

import os
import signal
import sys
import time

import openai
import ray

from segue.config import EngineConfig
from segue.integrations.ray import FleetConfig, RayFleet, TrainerConfig

PROMPT = "The quick brown fox"


def main(model: str | None = None) -> None:
    ray.init(num_cpus=4, include_dashboard=False)
    config = FleetConfig(
        engine=EngineConfig(model=model, device="cpu", memory_ratio=0.2, max_model_len=2048),
        engines=2,
        trainer=TrainerConfig(model=model),
    )
    with RayFleet.start(config) as fleet, openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="-") as client:
        step = ray.get(fleet.trainer.train_step.remote([f"{PROMPT} jumps over the lazy dog."]))
        sent = ray.get(fleet.trainer.sync.remote())
        print(f"loss {step['loss']:.3f}; {len(sent['endpoints'])} engines have the new weights")
        name = client.models.list().data[0].id
        stream = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=60, temperature=0, stream=True
        )
        for index, event in enumerate(stream):
            print(event.choices[0].text, end="", flush=True)
            if index == 10:
                kill_the_busy_one(fleet)
        print("\nThe reply is whole. Waiting for the engine that was killed …")
        fleet.wait_ready(300)
        for each in fleet.describe():
            print(f"{each.name}: process {each.pid} at {each.url}{', restarted' * each.is_restarted}")
    ray.shutdown()


def kill_the_busy_one(fleet: RayFleet) -> None:
    """Kill the engine that answers; both would do if they were equally busy."""
    workers = fleet.endpoint.get("workers", 10).fields["workers"]
    busy = max(workers, key=lambda worker: worker["in_flight"])["url"]
    (engine,) = [each for each in fleet.describe() if each.url == busy]
    print(f" [{engine.name} is killed at {time.strftime('%H:%M:%S')}] ", end="", flush=True)
    os.kill(engine.pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
