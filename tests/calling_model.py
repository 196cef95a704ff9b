"""The demo model as one that calls tools: a template that shows them, and a push towards the first token of a call.

Its own template drops tools, and at 135M parameters it prefers to talk about a call; with the push it makes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, running_gateway

# A call is a bare JSON object, so that a required one has no mark before it that the model could put off.
_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and (tools or message.role == 'system') %}<|im_start|>system
{% if message.role == 'system' %}{{ message.content }}
{% endif %}{% if tools %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
To call one answer only with {"name": name, "arguments": arguments}{% endif %}<|im_end|>
{% endif %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.tool_calls %}{% for call in message.tool_calls -%}
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
{%- endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>tool
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
# The token `{"` of SmolLM2's vocabulary. More than this and it comes inside of strings too.
_PUSH = "39428+8"


def calling_model(demo_model: Path, folder: Path, **fields: Any) -> dict[str, Any]:
    """The entry of the model in a configuration."""
    template = folder / "tools.jinja"
    template.write_text(_TEMPLATE)
    arguments = ["--chat-template-file", str(template), "--logit-bias", _PUSH]
    return {"path": str(demo_model), "extra_args": arguments, **fields}


@contextmanager
def calling_gateway(native_engine: Path | None, demo_model: Path, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway with that model alone."""
    if native_engine is None:
        pytest.skip("the embedded engine takes no --logit-bias; deploy/native-engine-debian.sh installs a native one")
    config = {
        "engine": {"binary": str(native_engine)},
        "memory": {"ram_reserve": "256MiB"},
        "models": {MODEL_ID: calling_model(demo_model, folder, context=1024)},
    }
    with running_gateway(config, folder) as running:
        yield running
