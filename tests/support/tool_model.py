"""A model whose chat template knows tools and reasoning, in short, as those of Hermes and Qwen3 do."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_model import write_model

# The fake worker repeats the prompt, which begins with the argument ``reply``: that is what the model says.
HERMES = (
    "{% if reply is defined %}{{ reply }}<|im_end|>{% endif %}"
    "{% if tools %}<|im_start|>system\n"
    'Call tools as <tool_call>{"name": …, "arguments": …}</tool_call>: {{ tools | tojson }}<|im_end|>\n'
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking | default(false) %}<think>\n{% endif %}{% endif %}"
)
LLAMA = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>user<|end_header_id|>\n"
    'Respond in the format {"name": function name, "parameters": arguments}. {{ tools | tojson }}<|eot_id|>'
    "{% endif %}{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n"
    "{{ m.content }}<|eot_id|>"
    "{% endfor %}"
)


def write_tool_model(directory: Path) -> Path:
    """Write a model without weights."""
    write_model(directory, max_position_embeddings=2048)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": HERMES}))
    return directory
