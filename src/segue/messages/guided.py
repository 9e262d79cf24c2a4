"""What guided output is guided by: the grammar of a request, and the vocabulary that all grammars share."""

from __future__ import annotations

from typing import Literal

import msgspec

# json_schema: a JSON schema. regex: a regular expression that all of the output matches. choice: a JSON list
# of strings, one of which is the output. grammar: a context-free grammar, in Lark's notation or in GBNF.
GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]
ANY_JSON_OBJECT = '{"type":"object"}'  # the schema of `json_object`


class LostGuide(str):
    """Why a request's place in its grammar was lost: something has failed here, and not the grammar."""

    __slots__ = ()


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """The language that an output belongs to. The frontend checks it; scheduler and runner trust it."""

    kind: GrammarKind
    text: str


class GuidedVocabulary(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Tells rank 0 which bytes each token stands for; sent once, before the first guided request."""

    tokens: list[bytes]  # by id, one per logit
    special_ids: list[int]  # tokens that no text contains
    eos_ids: list[int]  # they end an output, where its grammar lets it end
