"""The header reader: true on real files, bounded and one sentence long on everything else."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import pack, pack_into
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import ModelFileError
from app.gguf import TENSOR_TYPES, ModelFacts, read_header
from tests import shapes
from tests.gguf_writer import U32, Shape, Tensor, header, text, value, write

SMALL = shapes.dense(layers=2, embedding=256, heads=4, kv_heads=2, head_length=64, feed_forward=512, vocabulary=300)


def small_metadata(**extra: Any) -> dict[str, Any]:
    return {"general.architecture": "llama", "llama.block_count": U32(2), **extra}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf", SMALL, words=True)


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_bytes(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write_bytes


def refusal(path: Path) -> str:
    """The message of the refusal, checked to be one or two short sentences that name the file."""
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))
    return message


# --- against the gguf package -------------------------------------------------------------------------------------


def oracle(path: Path) -> Any:
    return gguf.GGUFReader(path)


@pytest.fixture(scope="module")
def demo_oracle(demo_model: Path) -> Any:
    """Read once: the package takes seconds for a vocabulary."""
    return oracle(demo_model)


def assert_agrees(facts: ModelFacts, reader: Any) -> None:
    assert [(t.name, t.shape, t.type, t.size_bytes) for t in facts.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), int(t.tensor_type), int(t.n_bytes)) for t in reader.tensors
    ]
    first_offset = min(int(t.data_offset) - own.offset for t, own in zip(reader.tensors, facts.tensors, strict=True))
    assert all(
        int(t.data_offset) - own.offset == first_offset for t, own in zip(reader.tensors, facts.tensors, strict=True)
    )
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(fields) == set(facts.metadata) | set(facts.array_lengths)
    for name, field in fields.items():
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        if not is_array:
            assert facts.metadata[name] == field.contents(), name
        else:
            assert facts.array_lengths[name] == len(field.data)


def test_demo_model_agrees_with_the_gguf_package(demo_model: Path, demo_oracle: Any) -> None:
    facts = read_header(demo_model)
    assert_agrees(facts, demo_oracle)
    assert facts.file_bytes == demo_model.stat().st_size
    assert (facts.architecture, facts.layers, facts.context_trained) == ("llama", 30, 8192)
    assert facts.vocabulary_size == 49152
    assert facts.quantisation == "Q4_1"
    assert facts.parameters == 134_515_008
    assert facts.chat_template is not None
    assert "<|im_start|>" in facts.chat_template


@pytest.mark.parametrize("count", [1, 63, 64, 65, 5000])
def test_words_of_any_length_are_stepped_over(tmp_path: Path, count: int) -> None:
    chance = random.Random(count)
    # Lengths whose first byte is that of a short one, bytes that look like a length, and runs of short words.
    words = [
        "\0" * chance.choice([0, 1, 7, 31, 32, 255, 256, 257, 300, 70000 if count < 99 else 6]) for _ in range(count)
    ]
    words += [chr(chance.randrange(32)) * chance.randrange(9) for _ in range(count)]
    path = write(tmp_path / "words.gguf", SMALL, extra={"tokenizer.ggml.merges": words, "general.after": "here"})
    assert_agrees(read_header(path), oracle(path))


def test_arrays_come_only_when_asked_for(demo_model: Path, demo_oracle: Any) -> None:
    plain = read_header(demo_model)
    assert "tokenizer.ggml.tokens" not in plain.metadata
    asked = read_header(demo_model, arrays={"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"})
    fields = demo_oracle.fields
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        assert list(asked.metadata[name]) == fields[name].contents()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "build",
    [shapes.qwen35moe, shapes.mixture, shapes.gpt_oss, shapes.gemma3, shapes.deepseek2, shapes.dense],
    ids=lambda build: build.__name__,
)
def test_shapes_agree_with_the_gguf_package(build: Callable[[], Shape], tmp_path: Path) -> None:
    path = write(tmp_path / "shape.gguf", build())
    assert_agrees(read_header(path), oracle(path))


def test_block_sizes_agree_with_the_gguf_package() -> None:
    known = {int(number): sizes for number, sizes in gguf.GGML_QUANT_SIZES.items()}
    known[9] = (32, 36)  # the package still has the size of an older Q8_1
    ours = {number: (kind.block, kind.size) for number, kind in TENSOR_TYPES.items()}
    assert ours.pop(42) == (64, 18)
    known.pop(42, None)
    assert ours == known


def test_short_numeric_arrays_are_kept_and_hold_per_layer(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SMALL, extra={"llama.attention.head_count_kv": [2, 4]})
    facts = read_header(path)
    assert facts.per_layer("attention.head_count_kv", 0) == (2, 4)
    assert facts.per_layer("attention.head_count", 0) == (4, 4)
    assert facts.integer("attention.head_count_kv", 0) == 4
    path = write(tmp_path / "n.gguf", SMALL, extra={"llama.attention.head_count_kv": [2]})
    with pytest.raises(ModelFileError, match="head_count_kv has 1 integers for 2 blocks"):
        read_header(path).per_layer("attention.head_count_kv", 0)


def test_a_large_vocabulary_takes_a_tenth_of_a_second(tmp_path: Path) -> None:
    path = write(tmp_path / "words.gguf", shapes.qwen35moe(), words=True)
    assert path.stat().st_size > 20e9
    assert path.stat().st_blocks * 512 < 20e6
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        facts = read_header(path)
        seconds.append(time.perf_counter() - begin)
    assert facts.array_lengths["tokenizer.ggml.merges"] == 248320
    assert min(seconds) < 0.25  # 0.1 s on a quiet machine; walking it in the gguf package takes 13 s


# --- split models -------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    paths = []
    for number in range(3):
        shape = Shape("llama", SMALL.keys, SMALL.tensors[number::3], SMALL.vocabulary)
        extra = {"split.no": U32(number), "split.count": U32(3), "split.tensors.count": len(SMALL.tensors)}
        paths.append(write(tmp_path / f"m-{number + 1:05}-of-00003.gguf", shape, extra=extra))
    return paths


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_shard_names_the_whole_model(split: list[Path], named: int) -> None:
    facts = read_header(split[named])
    assert facts.path == split[0]
    assert facts.shards == tuple(split)
    assert facts.file_bytes == sum(path.stat().st_size for path in split)
    assert {tensor.name for tensor in facts.tensors} == {tensor.name for tensor in SMALL.tensors}


def test_missing_shards_are_listed_by_name(split: list[Path]) -> None:
    split[0].unlink()
    split[2].unlink()
    message = refusal(split[1])
    assert "m-00001-of-00003.gguf, m-00003-of-00003.gguf" in message


def test_a_renamed_shard_says_how_it_should_be_called(split: list[Path]) -> None:
    assert "-00001-of-00003.gguf" in refusal(split[0].rename(split[0].with_name("model.gguf")))


def test_a_shard_of_another_model_is_refused(split: list[Path], tmp_path: Path) -> None:
    split[2].write_bytes(split[1].read_bytes())
    with pytest.raises(ModelFileError, match="not part 3 of 3"):
        read_header(split[0])


# --- files that are no model --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n<!DOCTYPE html><html>Sign in", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
        (bytes(4096), "zero bytes"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (pack("<Q", 20) + b'{"weight":{}}' + bytes(50), "safetensors"),
        (b"tjgg" + bytes(50), "older than GGUF"),
        (b"GG", "is not a GGUF file"),
        (b"GGUF" + pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF\x03\x00", "cut off"),
    ],
)
def test_each_kind_of_wrong_file_has_its_own_sentence(put: Callable[[bytes], Path], content: bytes, words: str) -> None:
    assert words in refusal(put(content))


def test_missing_file_folder_and_pipe(tmp_path: Path) -> None:
    assert "There is no file" in refusal(tmp_path / "nothing.gguf")
    assert "is a folder" in refusal(tmp_path)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert "not a regular file" in refusal(pipe)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_no_permission(small: Path, unprivileged: None) -> None:
    if not os.geteuid() or os.access(small, os.R_OK, effective_ids=True):
        small.chmod(0)
    assert "may not be read" in refusal(small)


def test_every_truncation_is_told(small: Path) -> None:
    content = small.read_bytes()
    for length in (*range(4, 400, 7), len(content) // 2, len(content) - 1):
        small.write_bytes(content[:length])
        assert "cut off" in refusal(small), length


# --- hostile headers ----------------------------------------------------------------------------------------------


def head(count_tensors: int = 0, count_keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + pack("<IQQ", 3, count_tensors, count_keys) + rest


HOSTILE = {
    "2^63 tensors": head(1 << 63),
    "2^63 keys": head(0, 1 << 63),
    "key of 2^63 bytes": head(0, 1, pack("<Q", 1 << 63)),
    "string of 2^63 bytes": head(0, 1, text("k") + pack("<IQ", 8, 1 << 63)),
    "string of 2^40 bytes": head(0, 1, text("k") + pack("<IQ", 8, 1 << 40)),
    "array of 2^63 strings": head(0, 1, text("k") + pack("<IIQ", 9, 8, 1 << 63)),
    "array of 2^63 numbers": head(0, 1, text("k") + pack("<IIQ", 9, 10, 1 << 63)),
    "array of arrays": head(0, 1, text("k") + pack("<IIQ", 9, 9, 1) + bytes(64)),
    "unknown value type": head(0, 1, text("k") + pack("<I", 77) + bytes(64)),
    "2^32 dimensions": head(1, 0, text("t") + pack("<I", (1 << 32) - 1) + bytes(64)),
    "dimension of 0": head(1, 0, text("t") + pack("<IQIQ", 1, 0, 0, 0) + bytes(64)),
    "product over 2^64": head(1, 0, text("t") + pack("<I4QIQ", 4, *[1 << 40] * 4, 0, 0) + bytes(64)),
    "unknown tensor type": head(1, 0, text("t") + pack("<IQIQ", 1, 32, 999, 0) + bytes(64)),
    "withdrawn tensor type": head(1, 0, text("t") + pack("<IQIQ", 1, 32, 4, 0) + bytes(64)),
    "row that is no whole block": head(1, 0, text("t") + pack("<IQIQ", 1, 31, 2, 0) + bytes(64)),
    "offset beyond the file": head(1, 0, text("t") + pack("<IQIQ", 1, 32, 0, 1 << 60) + bytes(64)),
    "offset off the alignment": head(1, 0, text("t") + pack("<IQIQ", 1, 32, 0, 3) + bytes(512)),
    "overlapping tensors": head(2, 0, b"".join(text(n) + pack("<IQIQ", 1, 32, 0, 0) for n in "ab") + bytes(512)),
    "tensor twice": head(
        2, 0, b"".join(text("a") + pack("<IQIQ", 1, 32, 0, offset) for offset in (0, 128)) + bytes(512)
    ),
    "key twice": header({"a": 1}, []).replace(pack("<Q", 1), pack("<Q", 2), 1) + text("a") + value(1),
    "alignment of 0": header(small_metadata(**{"general.alignment": U32(0)}), []),
    "alignment of 3": header(small_metadata(**{"general.alignment": U32(3)}), []),
    "alignment of text": header(small_metadata(**{"general.alignment": "x"}), []),
    "no architecture": header({"a": 1}, []),
    "5 million strings": head(0, 1, text("k") + pack("<IIQ", 9, 8, 5_000_000) + bytes(40_000_000)),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused_in_bounded_time_and_memory(put: Callable[[bytes], Path], content: bytes) -> None:
    path = put(content)
    tracemalloc.start()
    begin = time.perf_counter()
    refusal(path)
    seconds = time.perf_counter() - begin
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2
    assert peak_bytes < 8 << 20


def test_unknown_tensor_type_is_named(put: Callable[[bytes], Path]) -> None:
    assert "of type 999" in refusal(put(HOSTILE["unknown tensor type"]))


def test_an_endless_header_stops_at_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    with path.open("wb") as file:
        file.write(head(0, 60000, b""))
        for number in range(12):
            file.write(text(f"key{number}") + pack("<IQ", 8, 15 << 20))
            file.truncate(file.tell() + (15 << 20))
            file.seek(0, os.SEEK_END)
    assert "longer than 64 MiB" in refusal(path)


def test_control_characters_of_a_file_do_not_reach_the_terminal(put: Callable[[bytes], Path]) -> None:
    message = refusal(put(head(1, 0, text("\x1b[2J\n" * 50) + pack("<IQIQ", 1, 32, 999, 0) + bytes(64))))
    assert "\x1b" not in message


@pytest.fixture(scope="module")
def real_head(demo_model: Path) -> bytes:
    with demo_model.open("rb") as file:
        return file.read(1 << 22)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated") / "model.gguf"


SMALL_HEAD = header(
    small_metadata(**{"llama.rope.sections": [1, 2, 3], "tokenizer.ggml.tokens": ["a", "b"], "flag": True}),
    [Tensor("token_embd.weight", (32, 10), "Q8_0"), Tensor("blk.0.attn_q.weight", (32, 32), "F16")],
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutations_of_a_small_header_never_crash(scratch: Path, data: st.DataObject) -> None:
    content = bytearray(SMALL_HEAD + bytes(-len(SMALL_HEAD) % 32 + 4096))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(SMALL_HEAD) - 8))
        if data.draw(st.booleans()):
            content[position] = data.draw(st.integers(0, 255))
        else:
            pack_into("<Q", content, position, data.draw(st.sampled_from([0, 1, 1 << 31, 1 << 32, 1 << 63, 2**64 - 1])))
    survives(scratch, bytes(content[: data.draw(st.integers(0, len(content)))]))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 3000), byte=st.integers(0, 255), length=st.integers(0, 1 << 22))
def test_mutations_of_the_demo_model_never_crash(
    scratch: Path, real_head: bytes, position: int, byte: int, length: int
) -> None:
    survives(scratch, real_head[:position] + bytes([byte]) + real_head[position + 1 : length])


def survives(path: Path, content: bytes) -> None:
    """Anything but a ModelFileError fails the test by itself."""
    path.write_bytes(content)
    with suppress(ModelFileError):
        assert read_header(path).architecture
