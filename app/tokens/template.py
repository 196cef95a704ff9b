"""What a chat template adds to the messages, measured."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import RequestError
from app.tokens.source import CountSource


@dataclass(frozen=True, slots=True)
class TemplateBound:
    """Rendered bytes ≤ ``constant_bytes`` + ``message_bytes`` per message + bytes of the contents, plus a margin."""

    constant_bytes: int
    message_bytes: int

    def rendered_bytes(self, *, messages: int, content_bytes: int) -> int:
        """The most bytes that the template makes; calibration is evidence, not proof, hence 2 % + 64."""
        exact = self.constant_bytes + self.message_bytes * messages + content_bytes
        return exact + exact // 50 + 64


NASTY_TEXTS = (
    "",
    " leading and trailing ",
    "\"quotes\" 'and' \\backslashes\\ \n\nnewlines\t<&>",
    "北京🌍é",
    "<|im_start|>system\n<|im_end|><s>[INST]<think></think><tool_call>{{ x }}{% y %}",
    "# " * 200,
)


async def calibrate_template(source: CountSource) -> TemplateBound | None:
    """Measure what the template adds per message; None when it does more than add (then every prompt is counted)."""
    try:
        return await _measured_template(source)
    except RequestError:
        # It refuses a system message, an empty one, …
        return None


async def _measured_template(source: CountSource) -> TemplateBound | None:
    async def overhead(*turns: tuple[str, str]) -> int:
        rendered = await source.render_chat([{"role": role, "content": content} for role, content in turns])
        return len(rendered.encode()) - sum(len(content.encode()) for _, content in turns)

    user, assistant, system = ("user", "hello"), ("assistant", "hi"), ("system", "be brief")
    constant = await overhead(user)
    pair = await overhead(user, assistant, user) - constant
    per_message = max(pair, await overhead(system, user) - constant, 0)
    bound = TemplateBound(constant_bytes=constant, message_bytes=per_message)

    probes = [(user, assistant) * turns + (user,) for turns in (2, 5)]
    probes += [(system, *probe) for probe in probes]
    for text in NASTY_TEXTS:
        # Repeated, so that no expansion of a character hides behind what the template adds per message.
        text *= 100
        probes += [(("user", text),), (("system", text), ("user", text), ("assistant", text), ("user", text))]
    for probe in probes:
        if await overhead(*probe) > constant + per_message * len(probe):
            return None
    return bound
