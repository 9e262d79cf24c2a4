from segue.trainer import WeightSender
from segue.trainer.model import TrainedModel

model = TrainedModel(learning_rate=1e-5)  # the bundled model in PyTorch, with AdamW
with WeightSender(["http://127.0.0.1:30000"], model.module) as sender:
    for step in range(1, 4):
        loss = model.train_step(["The capital of France is Paris."])
        report = sender.send(weight_version=f"step-{step}")
        print(f"step {step}: loss {loss:.2f}, {report.bytes / 1e6:.0f} MB in {report.seconds:.1f} s")
print("the server has step-3 now: see its page")
