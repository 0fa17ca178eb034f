"""What agents and chat pages send: the fields, the parts and the order are theirs, the words are ours.

Codex (codex-rs/codex-api, codex-rs/tools), Claude Code (POST /v1/messages?beta=true) and Open WebUI
(routers/openai.py, utils/middleware.py), as their public sources had them in 2026.
"""

from __future__ import annotations

from typing import Any

PATCH = '*** Begin Patch\n*** Add File: note.txt\n+It is "done".\n*** End Patch'
# What the scripted model answers.
ANSWER = (
    "<think>",
    "I list the files and write the note.",
    "</think>",
    "I begin.",
    '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls", "-a"]}}\n</tool_call>',
    '\n<tool_call>\n{"name": "apply_patch", "arguments": {"input": '
    '"*** Begin Patch\\n*** Add File: note.txt\\n+It is \\"done\\".\\n*** End Patch"}}\n</tool_call>',
)

CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You work in a terminal. Keep to what is asked.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read and write</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context><cwd>/tmp</cwd></environment_context>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Write a note."}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "array", "items": {"type": "string"}},
                    "timeout_ms": {"type": "number"},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a6f1-0000-7000-8000-000000000000",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "none"},
}

_SCHEMA = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False}
_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "You are an agent on a command line.", **_MARK},
        {"type": "text", "text": "Working folder: /tmp. Keep to what is asked.", **_MARK},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Notes of the project: none.</system-reminder>"},
                {"type": "text", "text": "Write a note.", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        {
            "name": "shell",
            "description": "Runs a command.",
            "input_schema": _SCHEMA | {"properties": {"command": {"type": "array"}}, "required": ["command"]},
        },
        {
            "name": "apply_patch",
            "description": "Edits files.",
            "input_schema": _SCHEMA | {"properties": {"input": {"type": "string"}}, "required": ["input"]},
        },
    ],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-api-key": "none",
    "x-app": "cli",
}

OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Write a note."}]},
    ],
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "shell",
                "description": "Runs a command.",
                "parameters": {"type": "object", "properties": {"command": {"type": "array"}}, "required": ["command"]},
            },
        }
    ],
}
OPEN_WEBUI_TITLE: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": 'Give a title of this chat as JSON: {"title": "..."}'}],
    "stream": False,
    "max_completion_tokens": 1000,
}
OPEN_WEBUI_HEADERS = {
    "Authorization": "Bearer none",
    "X-OpenWebUI-User-Name": "User",
    "X-OpenWebUI-User-Id": "0",
    "X-OpenWebUI-User-Email": "user@example.com",
    "X-OpenWebUI-User-Role": "user",
}
