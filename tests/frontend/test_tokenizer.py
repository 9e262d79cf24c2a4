import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from segue.errors import InvalidRequestError, ModelFileError
from segue.frontend.tokenizer import Tokenizer
from tests.checkpoint import tiny_gguf

TEXTS = [
    "",
    " ",
    "   \n\n\t  ",
    "hello world",
    "  leading and trailing  ",
    "Hello, World! It's 12345.67 o'clock; we'll see.",
    "<|end|><|user|> hello <think>\n</think>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>x",
    "<|im_start|",
    "naïve café e\u0301 Ångström A\u030a ﬁ",
    "日本語と中文 한국어 العربية עברית ไทย हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 👍🏽",
    "\x00\x01\x7f\u0080\ufeff\ufffd\u200b\u2028",
    "def f(x):\n\treturn x**2  # ²\r\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Ġ Ċ ▁ <0x0A> Ã©",
    "\U0010fffd\U0001f9ff",
]
MESSAGES = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo <|end|>\n"}],
    [
        {"role": "user", "content": '1 < 2 & "quotes" {{ braces }}'},
        {"role": "assistant", "content": "  "},
        {"role": "user", "content": "日本"},
    ],
]


def assert_same(
    directory: Path, theirs: Any, texts: Sequence[str], chats: Sequence[list[dict[str, str]]] = ()
) -> None:
    """Assert that Segue's tokenizer of `directory` and transformers' tokenizer `theirs` agree."""
    ours = Tokenizer.load(directory)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id in (*ours.eos_ids, None)
    for text in texts:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special
            )
    pick = random.Random(0)
    for _ in range(50):  # random ids cut characters in two
        ids = [pick.randrange(len(theirs)) for _ in range(pick.randrange(1, 9))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for chat in chats:
        for generation in (False, True):
            text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
            assert ours.apply_chat_template(chat, add_generation_prompt=generation) == text


def byte_level() -> Backend:
    """A small byte-level BPE with special and plain added tokens."""
    vocabulary = tiny_gguf.tokens()[: -len(tiny_gguf.SPECIALS + tiny_gguf.PLAIN_ADDED)]
    merges = [tuple(merge.split(" ")) for merge in tiny_gguf.MERGES]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?[^\s\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tiny_gguf.SPECIALS])
    backend.add_tokens([AddedToken(token) for token in tiny_gguf.PLAIN_ADDED])
    return backend


def sentencepiece() -> Backend:
    """A small BPE with byte fallback, as Llama 2's."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁helowrd",
        "he",
        "ll",
        "▁w",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("▁", "w")]
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(chain)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a tokenizer's files by hand."""

    def write(backend: Backend | None = None, model_type: str = "llama", **settings: Any) -> Path:
        (backend or byte_level()).save(str(tmp_path / "tokenizer.json"))
        settings = {"eos_token": "<|end|>", "chat_template": tiny_gguf.TEMPLATE, **settings}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": 5}))
        return tmp_path

    return write


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "declared",
    ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"],
)
def test_every_declared_class_gives_the_results_of_transformers(
    save: Save, model_type: str, declared: str
) -> None:
    directory = save(model_type=model_type, tokenizer_class=declared)
    assert_same(directory, AutoTokenizer.from_pretrained(directory), TEXTS, MESSAGES)


@pytest.mark.parametrize("declared", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_sentencepiece_gives_the_results_of_transformers(save: Save, declared: str) -> None:
    directory = save(
        sentencepiece(), tokenizer_class=declared, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    assert_same(directory, AutoTokenizer.from_pretrained(directory), TEXTS, MESSAGES)


def test_truncation_and_padding_in_the_file_are_ignored(save: Save) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    directory = save(backend, tokenizer_class="PreTrainedTokenizerFast")
    assert Tokenizer.load(directory).encode("hello world, hello") == Tokenizer(
        AutoTokenizer.from_pretrained(save(tokenizer_class="PreTrainedTokenizerFast"))
    ).encode("hello world, hello")


def test_eos_ids_come_from_configs_and_tokenizer(save: Save) -> None:
    directory = save(tokenizer_class="PreTrainedTokenizerFast")
    end = Tokenizer.load(directory).encode("<|end|>")[0]
    assert Tokenizer.load(directory).eos_ids == (5, end)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, end]}))
    assert Tokenizer.load(directory).eos_ids == (7, end)


def test_special_ids_are_those_that_decode_skips(save: Save) -> None:
    tokenizer = Tokenizer.load(save(tokenizer_class="PreTrainedTokenizerFast"))
    skipped = {
        i
        for i in range(tokenizer.vocab_size)
        if not tokenizer.decode([i]) and tokenizer.decode([i], skip_special_tokens=False)
    }
    assert tokenizer.special_ids == skipped == set(tokenizer.encode("".join(tiny_gguf.SPECIALS)))


def test_ids_beyond_the_vocabulary_decode_to_nothing(save: Save) -> None:
    tokenizer = Tokenizer.load(save(tokenizer_class="PreTrainedTokenizerFast"))
    assert tokenizer.decode([tokenizer.vocab_size + 9, *tokenizer.encode("hi")]) == "hi"


def test_a_lone_surrogate_is_an_error(save: Save) -> None:
    tokenizer = Tokenizer.load(save(tokenizer_class="PreTrainedTokenizerFast"))
    with pytest.raises(InvalidRequestError, match=r"lone surrogate, '\\ud800', at character 2"):
        tokenizer.encode("ab\ud800")


def test_no_chat_template_is_an_error_that_names_the_remedy(save: Save) -> None:
    tokenizer = Tokenizer.load(save(tokenizer_class="PreTrainedTokenizerFast", chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="/v1/completions") as caught:
        tokenizer.apply_chat_template(MESSAGES[0])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            [{"role": "user", "content": "x"}],
            "roles must alternate",
        ),
        ("{{ messages[0].content.nothing.at_all }}", [{"role": "user", "content": "x"}], "has no attribute"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": [{"type": "text"}]}], "concatenate"),
        ("{{ messages[0].__class__.__mro__ }}", [{"role": "user", "content": "x"}], "unsafe"),
        ("{% for m in messages %}", [{"role": "user", "content": "x"}], "Unexpected end of template"),
        ("{{ 1 }}", [], "empty conversation"),
        ("{{ 1 // (messages | length - 1) }}", [{"role": "user", "content": "x"}], "by zero"),
    ],
)
def test_messages_that_the_template_rejects_are_an_error_with_its_reason(
    save: Save, template: str, messages: list[dict[str, Any]], reason: str
) -> None:
    tokenizer = Tokenizer.load(save(tokenizer_class="PreTrainedTokenizerFast", chat_template=template))
    with pytest.raises(InvalidRequestError, match=reason):
        tokenizer.apply_chat_template(messages)


def test_arguments_reach_the_template(save: Save) -> None:
    tokenizer = Tokenizer.load(
        save(tokenizer_class="PreTrainedTokenizerFast", chat_template="{{ tools }}{{ flag }}")
    )
    assert tokenizer.apply_chat_template(MESSAGES[0], tools=[{"a": 1}], flag=7) == "[{'a': 1}]7"
    nested: dict[str, Any] = {}
    for _ in range(900):  # a body may be nested so deeply
        nested = {"a": nested}
    with pytest.raises(InvalidRequestError, match="recursion"):
        tokenizer.apply_chat_template(MESSAGES[0], tools=[nested])


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_an_error_that_names_the_directory(save: Save, content: str) -> None:
    directory = save(tokenizer_class="PreTrainedTokenizerFast")
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=f"tokenizer in {directory} cannot be loaded"):
        Tokenizer.load(directory)


def test_no_tokenizer_is_an_error_that_names_the_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"tokenizer in {tmp_path} cannot be loaded .* tokenizer.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("missing", ["sentencepiece", "protobuf"])
def test_a_sentencepiece_file_alone_is_an_error_that_names_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    monkeypatch.setattr(f"transformers.utils.import_utils.is_{missing}_available", lambda: False)
    expected = "there is no tokenizer.json; install sentencepiece and protobuf .* or save .* tokenizer.json"
    with pytest.raises(ModelFileError, match=expected):
        Tokenizer.load(tmp_path)


def test_threads_get_the_same_ids(save: Save) -> None:
    tokenizer = Tokenizer.load(save(tokenizer_class="PreTrainedTokenizerFast"))
    expected = [tokenizer.encode(text) for text in TEXTS]
    found: list[list[list[int]]] = []

    def work() -> None:
        found.extend([[tokenizer.encode(text) for text in TEXTS] for _ in range(20)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 80


def test_a_long_prompt_does_not_block_other_threads(save: Save) -> None:
    tokenizer = Tokenizer.load(save(tokenizer_class="PreTrainedTokenizerFast"))
    text = "hello world 12 " * 40_000
    started, done = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0)  # release the GIL, in case the other thread waits for it
    thread.join()
    assert turns > 100


WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.modules["torch"] = None  # importing it now raises ImportError
from segue.frontend.tokenizer import Tokenizer
from segue.checkpoint.source import resolve
source = resolve(sys.argv[1], "dummy", "/nonexistent")
tokenizer = Tokenizer.load(source.tokenizer_directory)
print(tokenizer.encode("hello"))
print(type(sys.modules["transformers"]).__module__)
import transformers  # others may use all of it
print(isinstance(tokenizer._chat, transformers.PreTrainedTokenizerBase), hasattr(transformers, "AutoConfig"))
print(type(sys.modules["transformers"]).__module__)
"""


@pytest.mark.parametrize("declared", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_loading_does_not_import_torch(save: Save, declared: str, transformers_imports_torch: bool) -> None:
    if transformers_imports_torch:
        pytest.skip("the installed transformers imports torch with any tokenizer")
    directory = save(model_type="qwen3", tokenizer_class=declared)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 300, "max_position_embeddings": 8, **sizes}
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    ids, before, whole, after = result.stdout.splitlines()
    assert json.loads(ids) == Tokenizer.load(directory).encode("hello")
    # The generic class needs no index of transformers' models, which is read once somebody asks for more.
    lacks_index = before == "segue.frontend.tokenizer_class"
    assert lacks_index == (declared == "PreTrainedTokenizerFast")
    assert whole == "True True" and after == "transformers.utils.import_utils"
