"""Converts a GGUF file's vocabulary to `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

The conversion uses only the file's metadata, so that token ids do not depend on the version of another
package that reads GGUF. Settings that the metadata lacks are chosen as transformers 5.23 chooses them.
"""

import json
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from segue.checkpoint.gguf.config import Keys, token_ids
from segue.checkpoint.gguf.file import GGUFFile
from segue.checkpoint.model_files import CONVERTED_KEY
from segue.errors import ModelFileError

_SPACE = "\u2581"  # stands for a space in SentencePiece

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _CL100K % r"\p{N}{1,3}"
_QWEN2 = _CL100K % r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {  # tokenizer.ggml.pre -> the pattern that cuts text into words before merging
    "gpt-2": _GPT2,
    "smollm": _GPT2,  # NOTE: the original also cuts before each digit; transformers, our reference, does not
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}


def convert(file: GGUFFile, directory: Path) -> None:
    """Write the tokenizer of `file` to `directory`; write nothing if the file has no tokenizer.

    Raises:
        ModelFileError: the vocabulary is of an unknown kind, or broken.
    """
    keys = Keys(file, "tokenizer.ggml")
    kind = keys.get("model", "none")
    if kind in ("none", "no_vocab"):
        return
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(
            f"model file {file.path} has tokenizer kind {kind!r} ('tokenizer.ggml.model'); supported in GGUF "
            "files: gpt2, llama. Use the model's safetensors directory, with its own tokenizer.json"
        )
    pre = keys.get("pre")
    if kind == "gpt2" and pre not in SPLITS:
        raise ModelFileError(
            f"model file {file.path} has pre-tokenizer {pre!r} ('tokenizer.ggml.pre'); supported: "
            f"{', '.join(SPLITS)}. Any other would give wrong token ids: use the model's safetensors "
            "directory or, if you know which of these it is, write it into a copy: gguf-new-metadata "
            "--pre-tokenizer NAME OLD.gguf NEW.gguf"
        )
    tokens = keys.need("tokens")
    try:
        named = {name.removesuffix("_id"): tokens[index] for name, index in token_ids(file).items()}
        backend = _byte_level(keys, SPLITS[pre]) if kind == "gpt2" else _sentencepiece(keys)
        _add_special_tokens(backend, keys, set(named.values()))
        backend.post_processor = _post_processor(keys, add_bos=kind == "llama")
        backend.save(str(directory / "tokenizer.json"), pretty=False)
    except ModelFileError:
        raise
    except Exception as error:  # a broken vocabulary can raise anything, in Python or in the Rust library
        raise ModelFileError(
            f"model file {file.path}: its tokenizer cannot be converted ({error!r}). Convert the model again"
        ) from error
    # tokenizer.json is complete; a tokenizer class of the model would rebuild it in a different way.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", CONVERTED_KEY: True, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _vocabulary(keys: Keys) -> dict[str, int]:
    return {token: index for index, token in enumerate(keys.need("tokens"))}


def _merges(pairs: list[str]) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (pair.partition(" ") for pair in pairs)]


def _byte_level(keys: Keys, split: str) -> Backend:
    """Return a byte-level BPE tokenizer, GPT-2's kind; `split` is the pattern that cuts text into words."""
    backend = Backend(models.BPE(vocab=_vocabulary(keys), merges=_merges(keys.need("merges"))))
    words = pre_tokenizers.Split(Regex(split), behavior="isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, of_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: Keys) -> Backend:
    """Return a BPE tokenizer of SentencePiece's kind: spaces are "▁", and unknown characters are bytes.

    A file says, by default yes, whether a text gets a space in front; decoding then removes it again.
    """
    vocabulary, merges = _vocabulary(keys), keys.get("merges")
    pairs = _merges_by_score(vocabulary, keys.need("scores")) if merges is None else _merges(merges)
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=True, byte_fallback=True))
    has_prefix = keys.get("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if has_prefix else "never", split=False
    )
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(vocabulary: dict[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, by falling score; of equal scores, longer left first.

    SentencePiece merges the pair whose result has the highest score; our backend needs that order as a list.
    """
    pairs = [
        (token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return sorted(pairs, key=lambda pair: (scores[vocabulary["".join(pair)]], *map(len, pair)), reverse=True)


def _add_special_tokens(backend: Backend, keys: Keys, named: set[str]) -> None:
    """Add the tokens that are matched in text as a whole: control tokens and user-defined tokens.

    `named`: the tokens that the file gives a role, as the end of text; they count as control tokens.
    """
    tokens = keys.need("tokens")
    types = dict(zip(tokens, keys.get("token_type", [TokenType.NORMAL] * len(tokens)), strict=True))
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    special = [token for token, type_ in types.items() if type_ in control or token in named]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = {token for token, type_ in types.items() if type_ == TokenType.USER_DEFINED} - named
    backend.add_tokens([AddedToken(token, normalized=False) for token in types if token in plain])


def _post_processor(keys: Keys, *, add_bos: bool) -> Any:
    """Return what adds the first and last token to a text's tokens ("$A").

    The file says whether there are such tokens; where it does not, `add_bos` decides for the first.
    """
    bos, eos = _added_token(keys, "bos", default=add_bos), _added_token(keys, "eos", default=False)
    single = [*(token for token, _ in bos), "$A", *(token for token, _ in eos)]
    return processors.TemplateProcessing(single=single, special_tokens=bos + eos)


def _added_token(keys: Keys, name: str, default: bool) -> list[tuple[str, int]]:
    """Return the token and id that every text gets as its first ("bos") or last ("eos"); empty: none.

    `default`: whether it is added if the file does not say so.
    """
    if not keys.get(f"add_{name}_token", default):
        return []
    index = keys.need(f"{name}_token_id")
    return [(keys.need("tokens")[index], index)]
