"""The tool calls of other models' formats through the gateway: every dialect, whole and streamed, raw text and tokens kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.core.ports import ParsedMessage
from reef_cli.engines.chat_parse import parse
from tests.doubles.engine import WordChat
from tests.gateway.inference_kit import PATHS, local, payloads, post, stored, with_tool
from tests.gateway.test_inference_local import ask, gathered, shown

BASH = '{"command": "ls -la"}'
FENCED = f"function<｜tool▁sep｜>bash\n```json\n{BASH}\n```"
V3 = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{FENCED}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
K2 = "<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
FORMATS = {
    "deepseek v3": V3,
    "deepseek v3.1": V31.replace("{}", BASH),
    "kimi k2": f"<|tool_calls_section_begin|>{K2.replace('{}', BASH)}<|tool_calls_section_end|>",
    "mistral": '[TOOL_CALLS][{"name": "bash", "arguments": ' + BASH + "}]",
    "mistral named": f"[TOOL_CALLS]bash[ARGS]{BASH}",
    "llama": "[bash(command='ls -la')]",
    "glm": "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls -la</arg_value>\n</tool_call>",
    "gpt-oss": f"<|channel|>analysis<|message|>I look.<|end|>{CALL}{BASH}",
}


class Reading(WordChat):
    """Reads answers as a real model's are read, and says whether that takes their special tokens."""

    special = False

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedMessage:
        return parse(text, tools)

    def marked_by_special(self, tools: bool) -> bool:
        return self.special and tools


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("family", FORMATS)
async def test_calls_arrive(tmp_path: Path, family: str, dialect: str) -> None:
    text = FORMATS[family]
    thought = "I look." if family == "gpt-oss" else ""
    async with local(tmp_path, text, chat=Reading()) as (made, _):
        body = ask(dialect, **with_tool(dialect)) | ({"max_tokens": 500} if dialect == "messages" else {})
        _, headers, whole = await post(made, PATHS[dialect], body)
        _, streamed, raw = await post(made, PATHS[dialect], {**body, "stream": True})
        said = ("", [("bash", {"command": "ls -la"})], thought)
        assert shown(dialect, orjson.loads(whole)) == gathered(dialect, payloads(raw)) == said
        for receipt in (headers["x-reef-agent-record-id"], streamed["x-reef-agent-record-id"]):
            record = stored(made, receipt)
            assert record.raw_text == text and record.finish == "tool_calls" and record.tokens is not None
            assert len(record.tokens.output_ids) == len(record.tokens.logprobs) > 0


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("family", ["deepseek v3", "kimi k2", "mistral named", "gpt-oss"])
async def test_what_is_cut_off_stays_text_and_nothing_is_lost(tmp_path: Path, family: str, dialect: str) -> None:
    text = FORMATS[family].partition(' "ls')[0]
    async with local(tmp_path, text, chat=Reading()) as (made, _):
        body = ask(dialect, **with_tool(dialect)) | ({"max_tokens": 500} if dialect == "messages" else {})
        _, headers, whole = await post(made, PATHS[dialect], body)
        _, _, raw = await post(made, PATHS[dialect], {**body, "stream": True})
        said = shown(dialect, orjson.loads(whole))
        assert said == gathered(dialect, payloads(raw)) and said[1] == []
        assert said[0] == text if family != "gpt-oss" else text.endswith(said[0]) and said[2] == "I look."
        assert stored(made, headers["x-reef-agent-record-id"]).raw_text == text


@pytest.mark.parametrize("special", [False, True])
async def test_special_tokens_are_asked_for_where_they_are_markers(tmp_path: Path, special: bool) -> None:
    chat = Reading()
    chat.special = special
    async with local(tmp_path, "hello", chat=chat) as (made, engine):
        await post(made, PATHS["chat"], ask("chat"))
        await post(made, PATHS["chat"], ask("chat", **with_tool("chat")))
        assert [asked.sampling.skip_special_tokens for asked in engine.asked] == [True, not special]
