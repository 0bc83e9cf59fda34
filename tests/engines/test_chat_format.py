"""Rendering equals transformers where a template can render, and is readable text where it cannot."""

import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from reef_cli.core.errors import InvalidRequest, ModelNotFound, UnsupportedField
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.chat_messages import Abilities

TEMPLATES = Path(__file__).parent / "templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file (“exactly”, <b>bytes</b> & all)",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
CALL = {"id": "call_000001", "type": "function", "function": {"name": "read_file", "arguments": {"path": "a & b.txt"}}}
TALK = [
    {"role": "user", "content": "hello  there"},
    {"role": "assistant", "content": "well"},
    {"role": "user", "content": "jumps\nover <the> 'lazy' dog ünïcode 🐠"},
]
SYSTEM = {"role": "system", "content": "be brief"}


def folder(base: Path, template: str | None, target: Path) -> Path:
    shutil.copytree(base, target, ignore=shutil.ignore_patterns("*.safetensors"))
    if template:
        shutil.copy(TEMPLATES / template, target / "chat_template.jinja")
    return target


def transformers_ids(path: Path, messages: list, tools: list | None = None) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return list(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False))


@pytest.fixture
def qwen(tiny: Path, tmp_path: Path) -> Path:
    return folder(tiny, "qwen_style.jinja", tmp_path / "qwen")


@pytest.fixture
def strict(tiny: Path, tmp_path: Path) -> Path:
    return folder(tiny, "strict_turns.jinja", tmp_path / "strict")


@pytest.mark.parametrize("messages", [TALK[:1], TALK, [SYSTEM, *TALK]])
def test_chatml_equals_transformers(tiny: Path, messages: list) -> None:
    assert ModelChat(tiny).render(messages) == transformers_ids(tiny, messages)


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (TALK, None),
        ([SYSTEM, *TALK], None),
        ([*TALK, {"role": "assistant", "content": "x"}, SYSTEM, TALK[0]], None),
        ([SYSTEM, *TALK], [TOOL]),
        ([TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "data"}], [TOOL]),
        ([TALK[0], {"role": "assistant", "content": "b", "reasoning_content": "hm"}], None),
    ],
)
def test_a_template_with_tools_equals_transformers(qwen: Path, messages: list, tools: list | None) -> None:
    chat = ModelChat(qwen)
    assert chat.abilities == Abilities(system=True, late_system=True, tools=True)
    assert chat.render(messages, tools or ()) == transformers_ids(qwen, messages, tools)


def test_arguments_as_a_json_string_render_like_the_object(qwen: Path) -> None:
    as_text = CALL | {"function": {"name": "read_file", "arguments": '{"path": "a & b.txt"}'}}
    turns = [[TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}] for call in (CALL, as_text)]
    assert ModelChat(qwen).text(turns[0], [TOOL]) == ModelChat(qwen).text(turns[1], [TOOL])
    broken = CALL | {"function": {"name": "read_file", "arguments": '{"path": '}}
    assert '{"path": ' in ModelChat(qwen).text([TALK[0], {"role": "assistant", "tool_calls": [broken]}], [TOOL])


def test_a_template_without_system_equals_transformers_and_gets_it_in_the_first_turn(strict: Path) -> None:
    chat = ModelChat(strict)
    assert chat.abilities == Abilities(system=False, late_system=False, tools=False)
    assert chat.render(TALK) == transformers_ids(strict, TALK)
    merged = [{"role": "user", "content": "be brief\n\nhello  there"}, *TALK[1:]]
    assert chat.render([SYSTEM, *TALK]) == transformers_ids(strict, merged)
    assert "be brief" in chat.text([SYSTEM])


def test_strict_turns_are_merged_and_hopeless_ones_refused(strict: Path) -> None:
    chat = ModelChat(strict)
    text = chat.text([TALK[0], TALK[2]])
    assert text.count("<start_of_turn>user") == 1 and "hello" in text and "lazy" in text
    with pytest.raises(InvalidRequest, match="refuses") as caught:
        chat.render([{"role": "assistant", "content": "first"}])
    assert "alternate" in caught.value.why


def test_late_system_text_is_moved_up_where_the_template_drops_it(tiny: Path, tmp_path: Path) -> None:
    path = folder(tiny, None, tmp_path / "first")
    (path / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}<<{{ messages[0]['content'] }}>>{% endif %}"
        "{% for m in messages if m['role'] != 'system' %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    )
    chat = ModelChat(path)
    assert chat.abilities == Abilities(system=True, late_system=False, tools=False)
    text = chat.text([SYSTEM, TALK[0], {"role": "developer", "content": "and kind"}, TALK[1]])
    assert text.startswith("<<be brief\n\nand kind>>[user:hello")


def test_tools_become_text_where_the_template_has_none(tiny: Path) -> None:
    chat = ModelChat(tiny)
    turns = [
        SYSTEM,
        TALK[0],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_000001", "content": [{"type": "text", "text": "line 1"}]},
    ]
    text = chat.text(turns, [TOOL])
    assert text.count("<|im_start|>system") == 1 and "be brief" in text and '"name": "read_file"' in text
    assert '<tool_call>\n{"name": "read_file", "arguments": {"path": "a & b.txt"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nline 1\n</tool_response>" in text
    (call,) = chat.parse(text.partition("assistant\n")[2].partition("<|im_end|>")[0], [TOOL]).tool_calls
    assert call["function"]["name"] == "read_file"


def test_roles_parts_and_null_content(tiny: Path) -> None:
    chat = ModelChat(tiny)
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert chat.text([{"role": "developer", "content": "d"}]) == chat.text([{"role": "system", "content": "d"}])
    assert chat.text([{"role": "user", "content": parts}]) == chat.text([{"role": "user", "content": "one\ntwo"}])
    assert chat.text([TALK[0], {"role": "assistant", "content": None}]) == chat.text(
        [TALK[0], {"role": "assistant", "content": ""}]
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_other_content_is_refused_by_name(tiny: Path, kind: str) -> None:
    with pytest.raises(UnsupportedField, match=kind):
        ModelChat(tiny).render([{"role": "user", "content": [{"type": kind}]}])


@pytest.mark.parametrize("messages", [[], [{"content": "x"}], [{"role": 3, "content": "x"}]])
def test_messages_without_sense_are_refused(tiny: Path, messages: list) -> None:
    with pytest.raises(InvalidRequest):
        ModelChat(tiny).render(messages)


def test_a_template_cannot_reach_out_of_its_sandbox(tiny: Path, tmp_path: Path) -> None:
    path = folder(tiny, None, tmp_path / "evil")
    (path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        ModelChat(path).render(TALK)


def test_named_templates_and_inline_config_are_found(tiny: Path, tmp_path: Path) -> None:
    import json

    path = folder(tiny, None, tmp_path / "named")
    (path / "chat_template.jinja").unlink()
    config = json.loads((path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert ModelChat(path)._render([], None) == "plain" and ModelChat(path)._render([], [TOOL]) == "read_file"
    (path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": "{% generation %}inline{% endgeneration %}"})
    )
    assert ModelChat(path).text(TALK) == "inline"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ModelChat(path).text([TALK[0]]).startswith("<|im_start|>user")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        ModelChat(tmp_path)


def test_context_length_is_the_models_or_less(tiny: Path) -> None:
    assert ModelChat(tiny).context_length == 512 == ModelChat(tiny, 9999).context_length
    assert ModelChat(tiny, 100).context_length == 100


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_encoding_is_lossless(tiny: Path, text: str) -> None:
    chat = _chat(tiny)
    assert chat.decode(chat.encode(text), skip_special_tokens=False) == text.encode("utf-8", "replace").decode()


_chats: dict[Path, ModelChat] = {}


def _chat(path: Path) -> ModelChat:
    return _chats.setdefault(path, ModelChat(path))


def test_torch_and_transformers_stay_out(tiny: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from reef_cli.engines.chat_format import ModelChat;"
        "import reef_cli.engines.serving, reef_cli.engines.process, reef_cli.engines.models, reef_cli.engines.launch;"
        f"ModelChat(Path({str(tiny)!r})).render([{{'role': 'user', 'content': 'a'}}]);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("token", "special", "always", "with_tools"),
    [
        ("[TOOL_CALLS]", True, False, True),
        ("<|python_tag|>", True, False, True),
        ("<｜tool▁calls▁begin｜>", False, False, False),
        ("<|tool_calls_section_begin|>", True, False, True),
        ("<|channel|>", True, True, True),
        ("<think>", True, True, True),
        ("<|unheard|>", True, False, False),
    ],
)
def test_markers_that_are_special_tokens_are_asked_for(
    tiny: Path, tmp_path: Path, token: str, special: bool, always: bool, with_tools: bool
) -> None:
    path = folder(tiny, None, tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    added = [AddedToken(token, special=special, normalized=False)]
    tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    tokenizer.save(str(path / "tokenizer.json"))
    chat = ModelChat(path)
    assert (chat.marked_by_special(False), chat.marked_by_special(True)) == (always, with_tools)
    ids = chat.encode(f"{token}read")
    assert chat.decode(ids) == ("read" if special else f"{token}read") and chat.decode(ids, False) == f"{token}read"
