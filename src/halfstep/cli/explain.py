"""``halfstep explain``: what a rule means, how it hurts, how to mend it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from halfstep.errors import PolicyError


class Explain:
    name = "explain"
    help = "what a rule means, how it hurts, how to fix it; without a rule: the table"
    takes_script = False
    description = """\
Explains a rule of the doctor: what it is, how it hurts a run, the fix, a broken and a right example.

  halfstep explain                            all rules, by family
  halfstep explain mean-of-means"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("rule", nargs="?", metavar="RULE", help="a rule's name as findings give it")

    def run(self, args: argparse.Namespace) -> int:
        from rich.console import Console
        from rich.markdown import Markdown

        from halfstep.checks.registry import rules
        from halfstep.checks.rules import page, sees

        console = Console()
        if args.rule is None:
            return _table(console)
        text = page(args.rule)
        if text is None and sees(args.rule) is not None:
            text = f"# {args.rule}\n\n{sees(args.rule)}\n"
        if text is None:
            near = _near(args.rule, rules())
            hint = f"did you mean {', '.join(near)}? " if near else ""
            raise PolicyError(f"there is no rule {args.rule!r}", f"{hint}halfstep explain lists them all")
        console.print(Markdown(text) if console.is_terminal else text.rstrip())
        return 0


def _near(word: str, names: Sequence[str]) -> list[str]:
    """Those that hold the word, or else those spelt much like it; at most 6."""
    held = [name for name in names if word.strip().lower().replace("_", "-") in name] if word.strip() else []
    return held[:6] or difflib.get_close_matches(word, names, n=3)


def _table(console: object) -> int:
    from rich.console import Console
    from rich.table import Table

    from halfstep.checks.rules import RULES

    assert isinstance(console, Console)
    for family, rules in RULES.items():
        if not console.is_terminal:
            print(f"\n{family}")
            for rule, text in rules.items():
                print(f"  {rule:34} {text}")
            continue
        table = Table(title=family, title_justify="left", title_style="bold", show_header=False, box=None)
        for rule, text in rules.items():
            table.add_row(f"[bold cyan]{rule}[/bold cyan]", text)
        console.print(table)
        console.print()
    return 0
