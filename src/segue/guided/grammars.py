"""Grammars as llguidance takes them, and what is wrong with one: no tokenizer is needed for that."""

from __future__ import annotations

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from segue.guided import beginning
from segue.guided.formats import with_bounds
from segue.messages.guided import GrammarSpec

MAX_GRAMMAR_BYTES = 1 << 16  # of a grammar's text
MAX_CHOICES = 1024
MAX_REASON_CHARS = 300
# What may stand between the parts of JSON where a schema does not say it (in ``x-guidance``): nothing, one
# space, or a new line with its indentation. Without a bound a model may fill its output with spaces.
JSON_SPACE = r"( |\n {0,32})?"

_PLAINLY = dict.fromkeys(  # what llguidance says by a name of its own
    ("NoExtension", "NoExtensionBias"), "no token of this model goes on with a text of the grammar"
)


class GrammarError(ValueError):
    """A grammar is wrong, or asks for what is not supported. The message is the reason."""


def to_llguidance(spec: GrammarSpec) -> str:
    """Return a grammar in llguidance's own form. A wrong one may only be found by :func:`check`.

    Raises:
        GrammarError: it cannot be converted.
    """
    try:
        match spec.kind:
            case "json_schema" if spec.text.strip() == "true":  # any JSON; llguidance takes objects alone
                return to_llguidance(GrammarSpec("json_schema", "{}"))
            case "json_schema" if spec.text.strip() == "false":
                raise GrammarError("no JSON fits the schema false; give another one")
            case "json_schema":
                text = with_bounds(spec.text)
                if '"x-guidance"' in text:  # it may have its own rules of spaces
                    return LLMatcher.grammar_from_json_schema(text)
                return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_SPACE})
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
            case "choice":
                choices = map(_quoted, json.loads(spec.text))
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
            case "grammar":
                return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
    except GrammarError:
        raise
    except Exception as error:  # the conversion from GBNF raises plain exceptions too
        raise GrammarError(reason_of(str(error) or type(error).__name__)) from None


def check(spec: GrammarSpec, *, is_accepted: bool = False) -> None:
    """Check a grammar as far as that is possible without the vocabulary; it may take part of a second.

    With ``is_accepted`` another engine decides whether it is too slow, and it may take longer here.

    Raises:
        GrammarError: it is too large, wrong, uses what llguidance does not support, or takes too long to
            begin.
    """
    if (size := len(spec.text.encode("utf-8", "surrogatepass"))) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    grammar = to_llguidance(spec)
    is_wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        raise GrammarError(reason_of(" ".join(problems)))
    if reason := beginning.what_is_wrong(grammar, is_accepted=is_accepted):
        raise GrammarError(reason_of(reason))


def reason_of(text: str) -> str:
    """Return what llguidance says, in one line of bounded length."""
    line = " ".join(text.split())
    line = _PLAINLY.get(line, line)
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}…"


def _quoted(text: str) -> str:
    """Return a text as a literal of Lark's notation, in which DEL is written as an escape, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
