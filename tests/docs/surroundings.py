"""What blocks of the documentation find already there when they run: `<!-- run with: NAME -->`."""

from __future__ import annotations

from collections.abc import Callable

from bench.model_dir import write_tokenizer
from tests.checkpoint import tiny
from tests.docs.blocks import Block, blocks
from tests.docs.session import PageSession
from tests.support.certificates import make_certificate
from tests.support.tiny_model import write_model
from tests.support.tool_model import write_tool_model

MODEL = "SmolLM2-135M-Instruct"
# Names that a program uses for what belongs to its reader.
TRAINER = """
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained("small")
data = range(2)
def train(model, batch):
    pass

"""


def _trainer(session: PageSession, block: Block) -> str:
    """A small model that is being trained, and a server of the same model."""
    directory = session.folder / "small"
    if not directory.exists():
        write_tokenizer(tiny.save(tiny.make("llama-tied"), directory))
    serve(session, "--model", "small")
    return TRAINER


def _tool_model(session: PageSession, block: Block) -> str:
    """A server of a model whose template knows tools."""
    directory = write_tool_model(session.folder / "tools")
    serve(session, "--model", str(directory), "--load-format", "dummy")
    return ""


def _certificate(session: PageSession, block: Block) -> str:
    make_certificate(session.folder / "server.pem")
    return ""


def _options(session: PageSession, block: Block) -> str:
    """The file of options that the page shows, but for a small model in place of one of the hub."""
    (shown,) = [each for each in blocks(block.page) if each.language == "toml"]
    model = write_model(session.folder / "small")
    text = session.here(shown.text.replace("Qwen/Qwen3-0.6B", str(model)).replace("4096", "512"))
    (session.folder / "segue.toml").write_text(f'load-format = "dummy"\n{text}')
    return ""


def _prompts(session: PageSession, block: Block) -> str:
    lines = ('{"prompt": "One", "max_tokens": 4}\n', '{"prompt": "Two", "max_tokens": 4}\n')
    (session.folder / "prompts.jsonl").write_text("".join(lines))
    return ""


SURROUNDINGS: dict[str, Callable[[PageSession, Block], str]] = {
    "certificate": _certificate,
    "prompts.jsonl": _prompts,
    "segue.toml": _options,
    "tool model": _tool_model,
    "trainer": _trainer,
}


def serve(session: PageSession, *options: str) -> None:
    """Start one server, in place of those that run."""
    session.stop()
    session.start(["serve", *options])
    session.wait()


def make(session: PageSession, block: Block) -> str:
    """Make what a block needs; returns the text that stands before a program of Python."""
    return SURROUNDINGS[block.marks["run with"]](session, block)
