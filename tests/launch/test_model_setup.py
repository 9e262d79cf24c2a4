from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segue.config import EngineConfig
from segue.errors import ConfigError, ModelFileError
from segue.frontend.sampling_options import RequestLimits
from segue.frontend.tokenizer import chat_form
from segue.launch.model_setup import find_model, load_tokenizer, names_of, sampling_defaults
from tests.support.tool_model import HERMES

LIMITS = RequestLimits(max_seq_len=512, vocab_size=320, eos_ids=())
Configure = Callable[..., EngineConfig]


@pytest.fixture
def bare(tiny_model: Path, tmp_path: Path) -> Configure:
    """A model without a tokenizer; the fixture configures it."""
    directory = tmp_path / "bare"
    directory.mkdir()
    shutil.copy(tiny_model / "config.json", directory)

    def configure(generation: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return EngineConfig.create({}, model=str(directory), load_format="dummy", **options)

    return configure


def test_another_tokenizer_and_another_template(bare: Configure, tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    config = bare(tokenizer=str(tiny_model), chat_template=str(template))
    tokenizer = load_tokenizer(config, source := find_model(config))
    assert tokenizer is not None and source.tokenizer_directory == tiny_model
    assert source.tokenizer_digest(), "routers compare it"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<user>hi"
    template.write_text(HERMES)  # it says also how calls and reasoning are written
    other = load_tokenizer(config, source)
    form = chat_form(other, "auto", "auto")
    assert (form.tools, form.thinks, form.template.uses("tools")) == ("hermes", True, True)
    config = bare(tokenizer=str(tiny_model))
    plain = load_tokenizer(config, find_model(config))
    assert chat_form(plain, "auto", "auto").tools is None
    assert plain is not None and plain.apply_chat_template([{"role": "user", "content": "hi"}]) != "<user>hi"
    assert load_tokenizer(bare(), find_model(bare())) is None


@pytest.mark.parametrize(
    ("text", "has_tokenizer", "said"),
    [
        ("{% for m in messages %}", True, "is no template of Jinja .*Unexpected end of template"),
        (None, True, "the file cannot be read"),
        ("x", False, "the model has no tokenizer; give --tokenizer too"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(
    bare: Configure, tiny_model: Path, tmp_path: Path, text: str | None, has_tokenizer: bool, said: str
) -> None:
    path = tmp_path / "chat.jinja"
    if text is not None:
        path.write_text(text)
    config = bare(chat_template=str(path), **({"tokenizer": str(tiny_model)} if has_tokenizer else {}))
    with pytest.raises(ConfigError, match=said) as raised:
        load_tokenizer(config, find_model(config))
    assert raised.value.param == "chat_template"


def test_a_template_may_reject_what_it_is_tried_with(
    bare: Configure, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ raise_exception('no') if messages|length < 2 }}two")
    config = bare(chat_template=str(path), tokenizer=str(tiny_model))
    tokenizer = load_tokenizer(config, find_model(config))
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}] * 2) == "two"


def test_the_model_s_sampling_defaults_are_used_where_they_are_asked_for(bare: Configure) -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": None, "repetition_penalty": 1.05, "eos_token_id": 1}
    for choice, expected in (("model", {"temperature": 0.6, "top_k": 20}), ("openai", {})):
        config = bare(given, sampling_defaults=choice)
        assert sampling_defaults(config, find_model(config), LIMITS) == expected


def test_a_model_without_recommendations_has_openai_s_defaults(bare: Configure) -> None:
    config = bare(sampling_defaults="model")
    assert sampling_defaults(config, find_model(config), LIMITS) == {}


@pytest.mark.parametrize("value", [-1, "hot", True, [1]])
def test_a_recommendation_that_no_request_may_have_is_refused_at_start(bare: Configure, value: Any) -> None:
    config = bare({"temperature": value}, sampling_defaults="model")
    with pytest.raises(
        ModelFileError, match=r"generation_config.json: temperature=.*--sampling-defaults openai"
    ):
        sampling_defaults(config, find_model(config), LIMITS)


def test_the_model_has_the_names_that_it_was_given(bare: Configure) -> None:
    config = bare(served_model_name="a,b")
    assert names_of(config, find_model(config)) == ["a", "b"]
    assert names_of(bare(), find_model(bare())) == ["bare"]
