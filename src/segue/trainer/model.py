"""A model in training: a model of transformers, with AdamW."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from segue.checkpoint.gguf import weights as gguf_weights
from segue.checkpoint.source import ModelSource, resolve
from segue.config import Device, EngineConfig
from segue.errors import ConfigError, InvalidRequestError


class TrainedModel:
    """Parameters, optimizer and tokenizer of one model; methods must be called one at a time."""

    def __init__(
        self,
        model: str | None = None,
        *,
        device: Device = "auto",
        dtype: str = "float32",
        learning_rate: float = 1e-5,
        cache_dir: str | None = None,
    ) -> None:
        """``model`` and ``cache_dir`` are as for an engine, so that both can use the same files.

        Without a ``model`` it is the bundled one. ``dtype`` is that of the weights, also when they are sent.

        Raises:
            ConfigError: there is no such model or device, or a file is damaged.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device='cuda', but torch sees no CUDA device; use cpu or auto", param="device")
        place = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        source = resolve(model, "auto", cache_dir or EngineConfig.create().cache_dir)
        if source.config.fp8 is not None:
            raise ConfigError(
                f"model {source.name} is in FP8, and training needs more precise weights; use a bfloat16 "
                "version of it",
                param="model",
            )
        self.name = source.name
        self.module = load_model(source, getattr(torch, dtype)).to(place).train()
        self.num_steps = 0
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=learning_rate, fused=True)
        self._tokenizer: Any = None
        if source.tokenizer_directory is not None:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(source.tokenizer_directory)
            if self._tokenizer.pad_token is None:  # padding is masked, so any token will do
                any_token = self._tokenizer.convert_ids_to_tokens(0)
                self._tokenizer.pad_token = self._tokenizer.eos_token or any_token

    def train_step(self, texts: Sequence[str]) -> float:
        """Run one optimizer step on the likelihood of whole texts; returns their mean loss before the step.

        Raises:
            InvalidRequestError: the model has no tokenizer, or no text has two tokens.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"model {self.name} has no tokenizer for texts; start the server with a model that has one"
            )
        max_len = self.module.config.max_position_embeddings
        batch = self._tokenizer(
            list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_len
        ).to(self.module.device)
        mask = batch["attention_mask"]
        if int(mask.sum(1).max()) < 2:
            raise InvalidRequestError(
                "no text has two tokens, so there is none to predict; send longer texts"
            )
        labels = batch["input_ids"].masked_fill(mask == 0, -100)
        try:
            loss = self.module(input_ids=batch["input_ids"], attention_mask=mask, labels=labels).loss
            loss.backward()
            self._optimizer.step()
        finally:  # the next step must not use the gradients of a failed one
            self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        """Write a checkpoint that an engine can serve.

        Raises:
            InvalidRequestError: the directory cannot be written.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.module.save_pretrained(directory)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(directory)
        except OSError as error:
            raise InvalidRequestError(
                f"path={str(directory)!r} cannot be written: {error.strerror}; give a writable directory"
            ) from None


def load_model(source: ModelSource, dtype: torch.dtype) -> Any:
    """Returns the model of transformers with the source's weights, in ``dtype``."""
    if source.gguf is None:
        return transformers.AutoModelForCausalLM.from_pretrained(source.directory, dtype=dtype)
    # The engine's own conversion, in its default dtype, so that both begin with the same weights.
    weights = load_file(gguf_weights.convert(source.gguf, source.directory, source.config, torch.bfloat16))
    config = transformers.AutoConfig.from_pretrained(source.directory)
    kind = getattr(transformers, source.config.architecture)
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
