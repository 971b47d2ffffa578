"""Keep the words that this project banned out of identifiers, docstrings, comments, messages and pages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Parts of the repository that have not been rewritten yet.
PENDING: tuple[str, ...] = ()

WORDS = (
    "agenda", "alike", "beside", "desk", "door", "doors", "hear", "heard", "hears", "himself", "knew", "knows", "mine",
    "nobody", "road", "roads", "said", "stood", "tell", "tells", "told", "wants", "whoever", "whom",
    "wish", "wishes",
)  # fmt: skip
PHRASES = (
    "all the same", "are to be", "as far as", "at hand", "comes of it", "for all that", "good for", "has it that",
    "is to be", "let go", "let stand", "may well",
)  # fmt: skip
PATTERNS = (
    r"of (its|their|his) own(?=[.,;:)\"])",
    r"stands(?! for)",
    "wanted",
)
BANNED = re.compile(rf"\b({'|'.join((*WORDS, *PHRASES, *PATTERNS))})\b", re.IGNORECASE)

# A line that needs such a word for a good reason ends with this marker and the reason.
EXCEPTION = "word-ok:"


def split_identifiers(line: str) -> str:
    """Separate the words of identifiers: ``letGo`` and ``let_go`` become "let Go" and "let go"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line).replace("_", " ")


def checked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [name for name in listed if name.endswith((".py", ".md", ".toml", ".cfg")) or name == "Makefile"]
    return [ROOT / name for name in texts if not name.startswith(PENDING) and ROOT / name != Path(__file__).resolve()]


def test_banned_words_do_not_come_back() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}"
        for path in checked_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if EXCEPTION not in line and (match := BANNED.search(split_identifiers(line)))
    ]
    assert not found, "banned words; use plain terms (docs/glossary.md):\n" + "\n".join(found)


def test_identifiers_are_checked_word_by_word() -> None:
    assert BANNED.search(split_identifiers("def let_go(self):"))
    assert BANNED.search(split_identifiers("class WishList:"))
    assert not BANNED.search(split_identifiers("a storytelling railroad at handover"))
