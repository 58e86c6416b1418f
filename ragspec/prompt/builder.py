"""From a question and its passages to the target's prompt tokens."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment

from ragspec.corpus.passage import Passage
from ragspec.errors import InputError, ModelUnavailableError, SettingsError
from ragspec.prompt.arrangement import PassageOrder, arrange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_MARKUP = re.compile(r"<.+>|\[.+\]|\{.+\}|\|.+\|", re.DOTALL)

#: A passage cut shorter than this says nothing any more and is left out instead.
SHORTEST_PASSAGE_TOKENS = 16

_PASSAGE = {"number": 1, "title": "t", "text": "x", "document": "d"}
#: What a template is tried on when it is read: the branches that a job is sure to reach.
_TRIALS: dict[str, list[dict[str, object]]] = {
    "with two passages": [_PASSAGE, {**_PASSAGE, "number": 2}],
    "with a passage without title": [{**_PASSAGE, "title": ""}],
    "without passages": [],
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        token_ids: [n].
        passage_spans: [start, end) token ranges of the passages in it; empty where the tokenizer gives no offsets.
        used: the passages that are in it, the last perhaps cut; best first, however they are arranged.
    """

    token_ids: tuple[int, ...]
    passage_spans: tuple[tuple[int, int], ...]
    used: tuple[Passage, ...]


class PromptBuilder:
    """Renders the prompt template through the target's chat template and keeps it inside the window.

    Args:
        tokenizer: the target's.
        window: tokens of prompt and answer.
        template: a Jinja file in place of the default.
        passage_order: in which order the template gets the passages.

    Raises:
        SettingsError: the template cannot be read, is not valid Jinja or fails on a sample (names RAGSPEC_PROMPT_TEMPLATE
            and the line or the sample).
        ModelUnavailableError: the chat template takes no user message (code `unsupported_chat_template`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        window: int,
        template: Path | None = None,
        passage_order: PassageOrder = "score",
    ) -> None:
        self._tokenizer = tokenizer
        self._window = window
        self._passage_order = passage_order
        source = _read(template)
        self._template = _compile(source, template)
        chat = getattr(tokenizer, "chat_template", None) or ""
        self._chat = bool(chat)
        self._system_role = self._chat and _takes_system(tokenizer)
        written = f"{source}\0{chat}" if passage_order == "score" else f"{source}\0{chat}\0{passage_order}"
        #: First 16 hex digits of the SHA-256 of the prompt template, the chat template and the order of passages where it is
        #: not by score, recorded with every answer.
        self.template_hash = hashlib.sha256(written.encode()).hexdigest()[:16]
        self._control = _control_tokens(tokenizer)

    def build(self, question: str, passages: Sequence[Passage], max_tokens: int) -> Prompt:
        """The prompt, its passages cut from the worst where they do not fit beside the answer's room.

        The answer's room is `max_tokens`, but at most half the window: what an answer may take must not push out what
        it is drawn from.

        Raises:
            InputError: the question alone does not fit (code `question_too_long`).
        """
        budget = self._window - min(max_tokens, self._window // 2)
        used = list(passages)
        while True:
            text = self._render(question, arrange(used, self._passage_order))
            token_ids, offsets = self._encode(text)
            excess = len(token_ids) - budget
            if excess <= 0:
                return Prompt(tuple(token_ids), self._spans(text, used, offsets), tuple(used))
            if not used:
                msg = f"The question takes {len(token_ids)} tokens with its instructions; {budget} are there for a prompt."
                raise InputError(msg, "Shorten it or raise RAGSPEC_CONTEXT_WINDOW.", code="question_too_long")
            used = self._cut_last(used, excess)

    def _cut_last(self, used: list[Passage], excess: int) -> list[Passage]:
        """The passages with at least `excess` tokens fewer in the last, or without it."""
        last = used[-1]
        tokens = self._tokenizer(last.text, add_special_tokens=False)["input_ids"]
        keep = len(tokens) - excess
        if keep < SHORTEST_PASSAGE_TOKENS:
            return used[:-1]
        text = str(self._tokenizer.decode(tokens[:keep], clean_up_tokenization_spaces=False))
        # Cutting at a token can end inside a character, and decoding need not give back the very text: keep its prefix.
        common = next((i for i, (a, b) in enumerate(zip(text, last.text, strict=False)) if a != b), len(text))
        return [*used[:-1], replace(last, text=last.text[: min(common, len(last.text) - 1)].rstrip())]

    def _render(self, question: str, passages: Sequence[Passage]) -> str:
        shown = [
            {
                "number": i,
                "title": self._plain(p.title),
                "text": self._plain(p.text),
                "document": self._plain(p.document),
            }
            for i, p in enumerate(passages, start=1)
        ]
        variables = {"question": self._plain(question), "passages": shown}
        contents = {}
        for role in ("system", "user"):
            if role in self._template.blocks:
                context = self._template.new_context(variables)
                content = "".join(self._template.blocks[role](context)).strip()
                if content:
                    contents[role] = content
        whole = "\n\n".join(contents.values())
        if not self._chat:
            return whole + "\nAnswer:"
        return _through_chat_template(self._tokenizer, contents if self._system_role else {"user": whole})

    def _plain(self, text: str) -> str:
        # A control token written in a question or a passage must stay text: it could otherwise end the user's turn.
        for token in self._control:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        # The chat template writes its own special tokens; a base model's tokenizer adds its own.
        fast = bool(getattr(self._tokenizer, "is_fast", False))
        encoded: Any = self._tokenizer(text, add_special_tokens=not self._chat, return_offsets_mapping=fast)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"]) if fast else []

    def _spans(
        self, text: str, passages: Sequence[Passage], offsets: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        spans = []
        for passage in passages:
            shown = self._plain(passage.text).strip()
            start = text.find(shown) if shown else -1
            inside = [i for i, (left, right) in enumerate(offsets) if left < start + len(shown) and right > start]
            if start >= 0 and inside:
                spans.append((inside[0], inside[-1] + 1))
        return tuple(spans)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the tokenizer reads as one token of the model's own markup, the longest first.

    Most special tokens have no name (`eos_token` and the like), and some markup is not even called special (Qwen's
    `<tool_call>`, `<think>`); that is told by its brackets from words and white space that a vocabulary was grown by.
    """
    added = tokenizer.added_tokens_decoder.values()
    marked = {token.content for token in added if token.special or _MARKUP.fullmatch(token.content)}
    return sorted(marked.union(tokenizer.all_special_tokens), key=len, reverse=True)


def _through_chat_template(tokenizer: PreTrainedTokenizerBase, contents: dict[str, str]) -> str:
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _takes_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a system message comes through the chat template; Gemma 2's raises, and others leave it out.

    Raises:
        ModelUnavailableError: not even a user message does.
    """
    system, user = "Probe of the system message.", "Probe of the user message."
    try:
        if system in _through_chat_template(tokenizer, {"system": system, "user": user}):
            return True
    except Exception as error:  # noqa: BLE001 - a model's template can raise anything; the log says what
        log.debug("the chat template refuses a system message: %s", error)
    reason = "it leaves the message out"
    try:
        if user in _through_chat_template(tokenizer, {"user": user}):
            log.info("the chat template takes no system message; its text goes before the user's")
            return False
    except Exception as error:  # noqa: BLE001 - as above
        reason = str(error)
    msg = f"The target's chat template takes neither a system message nor a user message alone: {reason}."
    advice = "Choose an instruction-tuned model for RAGSPEC_MODEL, or take the chat template out of its tokenizer."
    raise ModelUnavailableError(msg, advice, code="unsupported_chat_template")


def _read(template: Path | None) -> str:
    if template is None:
        return resources.files("ragspec.prompt").joinpath("default.jinja").read_text(encoding="utf-8")
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"RAGSPEC_PROMPT_TEMPLATE={str(template)!r} cannot be read: {error}."
        raise SettingsError(msg, "Give a UTF-8 Jinja file, or unset it for the default.") from error


def _compile(source: str, template: Path | None) -> Any:
    advice = "A template has blocks `system` and `user` and may use `question` and `passages`."
    named = f"RAGSPEC_PROMPT_TEMPLATE={str(template)!r}"
    environment = SandboxedEnvironment(undefined=StrictUndefined)
    try:
        compiled = environment.from_string(source)
    except TemplateError as error:
        where = f" line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        msg = f"{named}{where}: {error}."
        raise SettingsError(msg, advice) from error
    if "user" not in compiled.blocks:
        msg = f"{named} has no block `user`."
        raise SettingsError(msg, advice)
    for trial, passages in _TRIALS.items():
        try:
            context = compiled.new_context({"question": "q", "passages": passages})
            for block in compiled.blocks.values():
                "".join(block(context))
        except Exception as error:
            msg = f"{named} fails {trial}: {error}."
            raise SettingsError(msg, advice) from error
    return compiled
