"""A model directory without weights: a config and a small byte-level tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (
    "The capital of France is Paris. Hello world, how are you today? "
    "Grüße aus Köln; 東京と大阪; emoji 🙂🚀; numbers 0 1 2 3 4 5 6 7 8 9 10 100 1000. "
)
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['content'] == 'refuse' %}{{ raise_exception('refused by the template') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": EOS_ID,
}


def make_tokenizer() -> Tokenizer:
    """Make a tokenizer of about 320 tokens. A character beyond ASCII takes several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=special,
    )
    tokenizer.train_from_iterator([TEXT.encode("ascii", "ignore").decode()] * 4, trainer)
    return tokenizer


def write_model(directory: Path, **changes: object) -> Path:
    """Write a model without weights, for ``load_format="dummy"``; ``changes`` are of its `CONFIG`."""
    tokenizer = make_tokenizer()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab_size} | changes))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
