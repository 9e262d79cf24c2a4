"""``segue`` whose ``/server_info`` also has the scheduler's broken invariants, as ``problems``.

``python -m bench.checked_serve serve …`` takes the options of ``segue serve``.
"""

from __future__ import annotations

from msgspec.structs import replace

from segue.cli.entry import main as segue
from segue.frontend.control_calls import ControlCalls
from segue.messages.control import State


def main() -> None:
    """Be ``segue``."""
    ask = ControlCalls.get_state

    async def get_state(self: ControlCalls, *, check: bool = False) -> State:
        found = await ask(self, check=True)
        return replace(found, state=found.state | {"problems": found.problems})

    ControlCalls.get_state = get_state  # type: ignore[method-assign]
    segue()


if __name__ == "__main__":
    main()
