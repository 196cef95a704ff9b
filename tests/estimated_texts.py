"""Texts of many kinds, to measure estimates with."""

from __future__ import annotations

import json
import random
from pathlib import Path

from app.tokens.template import NASTY_TEXTS

_ROOT = Path(__file__).parent.parent
_DICE = random.Random(1)
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
TEXTS = {
    "prose": (_ROOT / "README.md").read_text(),
    "code": (_ROOT / "tests" / "fake_engine.py").read_text(),
    "settings": (_ROOT / "config.example.yaml").read_text(),
    "json": json.dumps({"tools": [_TOOL] * 20}, indent=2),
    "chinese": "人工智能正在改变世界。我们需要理解它的局限性,并且谨慎地使用它。今天天气很好,我想去公园散步。" * 20,
    "russian": "Искусственный интеллект меняет мир, и мы должны понимать его ограничения. " * 20,  # noqa: RUF001
    "german": "Die künstliche Intelligenz verändert die Welt; wir müssen ihre Grenzen verstehen. " * 20,
    "korean": "인공지능은 세상을 바꾸고 있습니다. 우리는 그 한계를 이해하고 신중하게 사용해야 합니다. " * 20,
    "thai": "ปัญญาประดิษฐ์กำลังเปลี่ยนแปลงโลก เราต้องเข้าใจข้อจำกัดของมัน " * 20,
    "emoji": "🎉🌍🚀👩‍👩‍👧‍👦 " * 50,
    "hex": "".join(_DICE.choices("0123456789abcdef", k=2000)),
    "random letters": "".join(
        _DICE.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", k=2000)
    ),
    "numbers": " ".join(str(_DICE.randrange(10**9)) for _ in range(200)),
    "capitals": "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 20,
    "nasty": "".join(NASTY_TEXTS),
}
