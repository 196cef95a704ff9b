"""The demo model as one that thinks: a chat template that opens a thought, which the engine tells from the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}
"""


def thinking_model(demo_model: Path, folder: Path, **fields: Any) -> dict[str, Any]:
    """The entry of the model in a configuration."""
    template = folder / "thinking.jinja"
    template.write_text(_TEMPLATE)
    return {"path": str(demo_model), "extra_args": ["--chat-template-file", str(template)], **fields}
