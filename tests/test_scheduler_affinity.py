"""Which slot a conversation goes to."""

from __future__ import annotations

from typing import Any

import pytest

from app.scheduler import SlotAffinity, prefix_chain

SYSTEM = {"role": "system", "content": "You are an agent. " * 20}


def conversation(name: str, turns: int, *, size: int = 400) -> list[dict[str, Any]]:
    """So many turns of one agent; a longer one begins with a shorter one."""
    messages: list[dict[str, Any]] = [SYSTEM]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{name} {turn} " * size}, {"role": "assistant", "content": "ok"}]
    return messages


def send(affinity: SlotAffinity, messages: list[dict[str, Any]], now: float) -> int | None:
    with affinity.slot(prefix_chain(messages), now=now) as slot:
        return slot


def test_conversations_go_back_to_their_slots() -> None:
    affinity = SlotAffinity(2)
    slots: dict[str, set[int | None]] = {"a": set(), "b": set()}
    for turn in range(1, 6):
        for name in "ab":
            slots[name].add(send(affinity, conversation(name, turn), turn * 10.0))
    assert [len(used) for used in slots.values()] == [1, 1]
    assert slots["a"] != slots["b"]


def test_a_small_request_takes_the_slot_with_the_least_to_lose() -> None:
    affinity = SlotAffinity(3)
    main = send(affinity, conversation("main", 5), 0)
    other = send(affinity, conversation("other", 2), 1)
    small = {
        send(affinity, [{"role": "user", "content": f"A title for chat {index}?"}], 2 + index) for index in range(9)
    }
    assert len(small) == 1
    assert not small & {main, other}
    assert send(affinity, conversation("main", 6), 20) == main


def test_a_shared_system_prompt_is_no_reason_to_throw_a_conversation_away() -> None:
    affinity = SlotAffinity(2)
    main = send(affinity, conversation("main", 5), 0)
    assert send(affinity, conversation("new", 1), 1) != main


def test_a_conversation_that_is_edited_goes_back_too() -> None:
    affinity = SlotAffinity(2)
    main = send(affinity, conversation("main", 5), 0)
    send(affinity, conversation("other", 5), 1)
    edited = [*conversation("main", 5)[:-2], {"role": "user", "content": "Something else."}]
    assert send(affinity, edited, 2) == main


def test_of_equals_the_one_not_used_for_longest() -> None:
    affinity = SlotAffinity(3)
    order = [send(affinity, conversation(name, 2), now) for now, name in enumerate("abc", start=1)]
    assert send(affinity, conversation("d", 2), 10) == order[0]
    assert send(affinity, conversation("e", 2), 11) == order[1]


def test_what_nobody_comes_back_for_is_worth_less_with_time() -> None:
    affinity = SlotAffinity(2)
    old = send(affinity, conversation("old", 8), 0)
    young = send(affinity, conversation("young", 2), 1)
    assert young != old
    assert send(affinity, conversation("young", 3), 4 * 3600) == young
    assert send(affinity, conversation("new", 2), 4 * 3600 + 60) == old


def test_a_busy_slot_is_not_chosen_and_none_when_all_are() -> None:
    affinity = SlotAffinity(2)
    chain = prefix_chain(conversation("a", 3))
    with affinity.slot(chain, now=0) as first:
        with affinity.slot(chain, now=1) as second:
            assert {first, second} == {0, 1}
            with affinity.slot(chain, now=2) as third:
                assert third is None
        with pytest.raises(RuntimeError), affinity.slot(chain, now=3) as again:
            assert again == second
            raise RuntimeError
    assert send(affinity, conversation("a", 4), 4) in (0, 1)


def test_chains() -> None:
    one, two = prefix_chain(conversation("a", 1)), prefix_chain(conversation("a", 2))
    assert two[: len(one)] == one
    assert prefix_chain(conversation("b", 1))[0] == one[0]
    assert prefix_chain(conversation("a", 1), head=b"tools")[0] != one[0]
    assert prefix_chain([{"a": 1, "b": 2}]) == prefix_chain([{"b": 2, "a": 1}])
    sizes = [link.size_bytes for link in two]
    assert sizes == sorted(sizes)
