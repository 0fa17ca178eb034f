"""What arrives in one turn of the event loop is handed on together."""

from __future__ import annotations

import asyncio

from beheld.api.turn_buffer import TurnBuffer


def test_entries_of_one_turn_go_together_also_in_another_loop() -> None:
    found: list[list[int]] = []
    buffer = TurnBuffer[int](found.append)

    async def add(*entries: int) -> None:
        for entry in entries:
            buffer.add(entry)

    async def two_turns() -> None:
        await add(2, 3)
        await asyncio.sleep(0)
        await add(4)
        buffer.flush()
        await asyncio.sleep(0)

    left = asyncio.new_event_loop()
    # It ends before the next turn.
    left.call_soon(buffer.add, 1)
    left.call_soon(left.stop)
    left.run_forever()
    left.close()
    asyncio.run(two_turns())
    assert found == [[2, 3], [4]]
