"""Parse a codec's spec: arguments, brackets and separators.

spec  = item { "|" item }
item  = name { ":" argument } [ "(" spec { "," spec } ")" ]
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError

MAX_CHARACTERS = 1000
"""Longest spec: other members send theirs, and each bracket is a call deeper."""
MAX_DEPTH = 8
MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Arguments:
    """A codec's arguments, and the whole spec for messages."""

    name: str
    values: tuple[str, ...]
    spec: str
    example: str

    def at_most(self, count: int) -> None:
        """Raise ConfigError if there are more arguments."""
        if len(self.values) > count:
            wanted = f"takes no more than {count} numbers" if count else "takes no number"
            raise ConfigError(
                f"codec {self.name} {wanted}", given=repr(self.spec), expected=self.example
            )

    def whole(self, default: int, *, place: int = 0) -> int:
        """Return an argument, by default the first, as an integer."""
        if len(self.values) <= place:
            return default
        text = self.values[place]
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise self.wrong()
        return int(text)

    def share(self) -> float:
        """Return the first argument as a decimal number."""
        try:
            return float(self.values[0])
        except (ValueError, IndexError):
            raise self.wrong() from None

    def wrong(self) -> ConfigError:
        """Return the error for an invalid argument."""
        return ConfigError(
            f"the number of codec {self.name} is wrong",
            given=repr(self.spec), expected=f"e.g. {self.example}",
        )  # fmt: skip


def split_outside(text: str, mark: str, spec: str) -> list[str]:
    """Split a text at the marks outside brackets."""
    parts, depth = [""], 0
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            "a codec's spec is too long",
            given=f"{len(text)} characters: {text[:40]!r}...", expected=f"at most {MAX_CHARACTERS}",
        )  # fmt: skip
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth > MAX_DEPTH:
            raise ConfigError(
                "a codec's spec has too many brackets inside each other",
                given=f"{text[:40]!r}...", expected=f"at most {MAX_DEPTH}",
            )  # fmt: skip
        if depth < 0:
            raise ConfigError("a codec's bracket was never opened", given=repr(spec))
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ConfigError(
            "a codec's bracket is not closed", given=repr(spec), expected=f"{spec.strip()})"
        )
    return [part.strip() for part in parts]
