"""The minimum that your own training loop needs to send its weights to a running engine.

segue serve --model path/to/model
python examples/minimal_trainer.py path/to/model http://127.0.0.1:30000
"""

import sys

import torch
import transformers

from segue.trainer import WeightSender

TEXT = "The quick brown fox jumps over the lazy dog."


def main(path: str, *urls: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = transformers.AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with WeightSender(urls, model) as sender:
        for step in range(3):
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sender.send(weight_version=f"step-{step}")
            print(f"step {step}: loss {loss:.3f}, {report.bytes} bytes in {report.seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
