"""Check of how hard the prose is to read: ``python -m docs.prose`` fails if a rate exceeds its allowance.

The rate is the number of phrases per 10,000 words that make a reader look for their noun, in docstrings and comments
of Python files, and in the text of Markdown pages. A low rate proves nothing: a sentence is good if an engineer who
reads it for the first time understands it. Lower an allowance when the rate has fallen.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Phrases per 10,000 words, and the share of test names that end or continue with a pronoun.
ALLOWANCES = {"zeus_plugins": 30, "bso_server": 25, "docs": 20, "tests": 12, "benchmarks": 15, "examples": 15}
NAMES_ALLOWANCE = 0.05

_NOUNLESS = re.compile(
    r"\b(?:what|who|whose|whoever|whatever|whichever)\b(?![^.]{0,60}\?)|\b(?:that|those) of\b|\bones? that\b"
    r"|\bthe ones?\b"
    r"|\b(?:tell|tells|told)\b|\b(?:where|if|unless) there (?:is|are)\b|\b(?:some|no|every)body\b|\blikewise\b"
    r"|\bgo(?:es)? on\b|\bby (?:then|now)\b|\banew\b|\bmeanwhile\b|\b(?:so|as) many\b|\b(?:nothing is|all that)\b",
    re.IGNORECASE,
)
_PRONOUN = re.compile(r"_(?:what|that|those|ones?|its?|others?|who|whose|nobody)(?:_|$)")


def texts(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a Python file, or the lines of a page outside of code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for number, part in enumerate(re.split(r"^```.*$", source, flags=re.MULTILINE)):
            if number % 2 == 0:
                yield from (re.sub(r"`[^`]*`", "x", line) for line in part.splitlines())
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield re.sub(r"`[^`]*`", "x", text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def rate(folder: str) -> float:
    """Return the phrases per 10,000 words in a folder of the repository."""
    files = [path for suffix in ("*.py", "*.md") for path in sorted((ROOT / folder).rglob(suffix))]
    prose = [text for path in files for text in texts(path)]
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in prose)
    return 1e4 * sum(len(_NOUNLESS.findall(text)) for text in prose) / max(words, 1)


def pronoun_share() -> float:
    """Return the share of test names with a pronoun in place of a noun."""
    files = (ROOT / "tests").rglob("*.py")
    names = [name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))]
    return sum(bool(_PRONOUN.search(name)) for name in names) / max(len(names), 1)


def main() -> int:
    """Print the rates; return 1 if one exceeds its allowance."""
    found = {folder: rate(folder) for folder in ALLOWANCES}
    share = pronoun_share()
    too_high = [
        f"{folder} has {found[folder]:.0f} difficult phrases per 10,000 words, more than {allowance}"
        for folder, allowance in ALLOWANCES.items()
        if found[folder] > allowance
    ]
    if share > NAMES_ALLOWANCE:
        too_high.append(f"{share:.1%} of the test names have a pronoun, more than {NAMES_ALLOWANCE:.0%}")
    for line in too_high:
        print(f"{line}: name the things (CONTRIBUTING.md)")
    return 1 if too_high else 0


if __name__ == "__main__":
    sys.exit(main())
