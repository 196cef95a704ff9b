"""Lines to copy: how to ask this gateway from a shell and from the usual libraries. Pure."""

from __future__ import annotations

import json
import shlex


def snippets(base_url: str, *, model: str, has_keys: bool, speaks_anthropic: bool) -> dict[str, str]:
    """Name → text; ``base_url`` has no ``/v1``, and keys are only named, never shown."""
    found = {"curl": _curl(base_url, model, has_keys), "Python, openai": _openai(base_url, model, has_keys)}
    if speaks_anthropic:
        found["Python, anthropic"] = _anthropic(base_url, model, has_keys)
    found["Environment"] = _environment(base_url, has_keys, speaks_anthropic)
    return found


def _curl(base_url: str, model: str, has_keys: bool) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' \\\n  -H "Authorization: Bearer $LLAMA_KEY"' if has_keys else ""
    url = shlex.quote(f"{base_url}/v1/chat/completions")
    return f"curl {url}{key} \\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"


def _openai(base_url: str, model: str, has_keys: bool) -> str:
    key = 'os.environ["LLAMA_KEY"]' if has_keys else '"none"'
    return (
        f"{'import os' + chr(10) if has_keys else ''}from openai import OpenAI\n\n"
        f"client = OpenAI(base_url={json.dumps(base_url + '/v1')}, api_key={key})\n"
        f"stream = client.chat.completions.create(\n    model={json.dumps(model)},\n"
        '    messages=[{"role": "user", "content": "Hello!"}],\n    stream=True,\n)\n'
        "for chunk in stream:\n    if chunk.choices:\n        "
        'print(chunk.choices[0].delta.content or "", end="", flush=True)'
    )


def _anthropic(base_url: str, model: str, has_keys: bool) -> str:
    key = 'os.environ["LLAMA_KEY"]' if has_keys else '"none"'
    return (
        f"{'import os' + chr(10) if has_keys else ''}from anthropic import Anthropic\n\n"
        f"client = Anthropic(base_url={json.dumps(base_url)}, api_key={key})\n"
        f"answer = client.messages.create(\n    model={json.dumps(model)},\n    max_tokens=256,\n"
        '    messages=[{"role": "user", "content": "Hello!"}],\n)\nprint(answer.content[0].text)'
    )


def _environment(base_url: str, has_keys: bool, speaks_anthropic: bool) -> str:
    key = "$LLAMA_KEY" if has_keys else "none"
    lines = [f"export OPENAI_BASE_URL={shlex.quote(base_url + '/v1')}", f'export OPENAI_API_KEY="{key}"']
    if speaks_anthropic:
        lines += [f"export ANTHROPIC_BASE_URL={shlex.quote(base_url)}", f'export ANTHROPIC_API_KEY="{key}"']
    return "\n".join(lines)
