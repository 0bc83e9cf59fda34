"""A model's tokenizer and chat template without torch or transformers, for the gateway's own process.

`ModelChat` renders as transformers' `apply_chat_template` does (same ids, tested) and copes with what a template cannot take:
see `chat_messages`. Templates come with downloaded models, so they run in jinja2's immutable sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from reef_cli.core.errors import InvalidRequest, ModelNotFound
from reef_cli.core.ports import ParsedMessage
from reef_cli.engines.chat_messages import Abilities, Message, canonical, fit, merge_neighbours
from reef_cli.engines.chat_parse import ALWAYS, MARKERS, parse

_MARK = "reefprobe"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _MARK, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ModelChat:
    """Port `ChatTemplate` for a Hugging Face model folder. Raises `ModelNotFound` when the folder has no tokenizer."""

    def __init__(self, model_dir: Path, context_length: int | None = None) -> None:
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFound(f"{model_dir} has no tokenizer.json", hint="give a Hugging Face model folder")
        self._tokenizer = Tokenizer.from_file(str(path))
        # A tokenizer file may carry the truncation of its training; prompts are never cut here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read(model_dir / "tokenizer_config.json")
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        self._marks_calls = not special.isdisjoint(MARKERS)
        self._marks_always = not special.isdisjoint(ALWAYS)
        self._special = _special_tokens(config | _read(model_dir / "special_tokens_map.json"))
        self._templates = _templates(model_dir, config)
        model = _read(model_dir / "config.json")
        self.vocabulary: int | None = model.get("vocab_size") or (model.get("text_config") or {}).get("vocab_size")
        """How many tokens the model knows; None where its configuration does not say."""
        longest = int(model.get("max_position_embeddings") or 4096)
        self.context_length = min(context_length or longest, longest)
        self.abilities = self._probe()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Prompt token ids, generation prompt included. Raises `UnsupportedField`, `InvalidRequest`."""
        return self.encode(self.text(messages, tools))

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt's text, as the template writes it."""
        fitted = fit(canonical(messages), tools, self.abilities)
        offered = [dict(tool) for tool in tools] if tools and self.abilities.tools else None
        try:
            return self._render(fitted, offered)
        except (TemplateError, TypeError):
            try:
                return self._render(merge_neighbours(fitted), offered)
            except (TemplateError, TypeError) as error:
                raise InvalidRequest(
                    "The model's chat template refuses these messages", why=str(error), hint="check roles and their order"
                ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: no begin or end token is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def marked_by_special(self, tools: bool) -> bool:
        """Whether an answer's special tokens are needed to read it: they mark reasoning or, where tools are offered, calls."""
        return self._marks_always or (tools and self._marks_calls)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedMessage:
        """The model's text as a message; tool calls are read only when tools were offered."""
        return parse(text, tools)

    def _render(self, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        rendered: str = self._templates[name].render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special
        )
        return rendered

    def _probe(self) -> Abilities:
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        system = {"role": "system", "content": _MARK}
        call = {"type": "function", "id": "probe0001", "function": {"name": _MARK, "arguments": {}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": "f", "tool_call_id": "probe0001", "content": "tool" + _MARK}
        lists = self._shows([user], [_PROBE_TOOL], _MARK)
        return Abilities(
            system=self._shows([system, user], None, _MARK),
            late_system=self._shows([user, answer, system, user], None, _MARK),
            tools=lists
            and self._shows([user, calling], None, _MARK)
            and self._shows([user, calling, result], None, "tool" + _MARK),
        )

    def _shows(self, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None, needle: str) -> bool:
        try:
            return needle in self._render(messages, tools)
        except (TemplateError, TypeError, ValueError, KeyError):
            return False


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; rendering just shows what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _templates(model_dir: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Compiled templates by name; ChatML stands in for a model that brings none."""
    file = model_dir / "chat_template.jinja"
    raw = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template") or _CHATML
    named = {"default": raw} if isinstance(raw, str) else {each["name"]: each["template"] for each in raw}
    extra = model_dir / "additional_chat_templates"
    named |= {path.stem: path.read_text(encoding="utf-8") for path in sorted(extra.glob("*.jinja"))}
    named.setdefault("default", next(iter(named.values())))
    environment = _environment()
    return {name: environment.from_string(source) for name, source in named.items()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
