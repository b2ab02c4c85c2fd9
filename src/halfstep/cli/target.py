"""Tells a subcommand's own options from the script it runs and the script's options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halfstep.launch import Target


def add_target(parser: argparse.ArgumentParser) -> None:
    """Show in the help what `split` understands."""
    group = parser.add_argument_group(
        "what to run", "Options after it belong to it; nothing of halfstep is read there."
    )
    group.add_argument(
        "target", nargs="?", metavar="SCRIPT [ARGS…]", help="a file, a folder or zip with __main__, or -"
    )
    group.add_argument("-m", metavar="MODULE", dest="module", help="a module, as python -m runs it")
    group.add_argument("-c", metavar="CODE", dest="code", help="code, as python -c runs it")


def split(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], Target | None]:
    """Split at the first word that is no option of ``parser`` (or value of one), as python splits its own line."""
    actions = parser._option_string_actions
    at = 0
    while at < len(words):
        word = words[at]
        if word in ("-m", "-c"):
            if at + 1 == len(words):
                parser.error(f"argument {word}: expected one argument")
            return list(words[:at]), _target(word, words[at + 1], words[at + 2 :])
        if word[:2] in ("-m", "-c"):  # -mMODULE, as python takes it
            return list(words[:at]), _target(word[:2], word[2:], words[at + 1 :])
        if word == "--":
            at += 1
            if at == len(words):
                break
        elif word.startswith("-") and word != "-":
            action = actions.get(word)
            takes_value = action is not None and action.nargs is None
            at += 2 if takes_value else 1
            continue
        return list(words[: at - (words[at - 1 : at] == ["--"])]), _target("", words[at], words[at + 1 :])
    return [word for word in words if word != "--"], None


def _target(flag: str, value: str, argv: Sequence[str]) -> Target:
    if flag:
        return Target("module" if flag == "-m" else "code", value, list(argv))
    return Target("stdin" if value == "-" else "script", value, list(argv))
