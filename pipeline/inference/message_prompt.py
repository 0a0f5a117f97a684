"""The prompt of a chat in a terminal. prompt_toolkit edits and recalls messages, and completes /commands.

Its import takes 0.14 s: `rlhf/chat.py` imports this module when a session starts.
"""

import os
from collections.abc import Callable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import is_searching
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle


def message_reader(commands: list[str]) -> Callable[[], str]:
    """Return a function that reads a message. Enter sends it; Alt-Enter, or Enter after a backslash, starts a new line.

    Tab completes a text that begins one of `commands`; Up and Ctrl-R recall earlier messages. They are in memory only:
    nobody asked for a file of what people typed. The function raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C.
    """
    # prompt_toolkit asks the terminal for the cursor's row, to place menus; this prompt has none. A terminal that does
    # not answer gets a warning after two seconds; a late answer appears in the next program's input.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=~is_searching)
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session = PromptSession[str](
        "> ",
        multiline=True,
        prompt_continuation=". ",
        key_bindings=keys,
        completer=WordCompleter(commands, sentence=True),
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_suspend=True,
    )
    return session.prompt
