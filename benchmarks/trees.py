"""Trees of synthetic text, and the turns of an agent that works in one: the same for every way of keeping them."""

import random
import shlex
from dataclasses import dataclass
from pathlib import Path

FILES_PER_FOLDER = 100
EDITS, ADDITIONS, DELETIONS = 50, 12, 1
CHANGED_PATHS = EDITS + ADDITIONS + DELETIONS
_LINES = 20_000
_WORDS = 4_000
_WORDS_PER_LINE = 9


@dataclass(frozen=True)
class Turn:
    """What one turn does: a line more for each of `edits`, whole new files, and deleted ones."""

    edits: dict[str, str]
    additions: dict[str, str]
    deletions: tuple[str, ...]

    def apply(self, folder: Path) -> None:
        """Does it from outside."""
        for path, line in self.edits.items():
            with (folder / path).open("a") as file:
                file.write(f"{line}\n")
        for path, text in self.additions.items():
            (folder / path).write_text(text)
        for path in self.deletions:
            (folder / path).unlink()

    def command(self) -> str:
        """The same for a shell whose working directory is the tree; builtins alone, but for the deletion."""
        edits = [f"echo {shlex.quote(line)} >> {path}" for path, line in self.edits.items()]
        additions = [f"printf %s {shlex.quote(text)} > {path}" for path, text in self.additions.items()]
        return "\n".join([*edits, *additions, f"rm -- {' '.join(self.deletions)}"])

    def written(self) -> list[str]:
        """The paths that have content after the turn and other content than before."""
        return sorted([*self.edits, *self.additions])


class SyntheticTree:
    """`files` texts of `file_bytes` each, a hundred to a folder; draws its turns one after the other."""

    def __init__(self, files: int, file_bytes: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._lines = self._vocabulary()
        self._lines_per_file = max(1, file_bytes // (sum(map(len, self._lines)) // len(self._lines)))
        self.texts = {_path(number): self._text() for number in range(files)}
        self._live = list(self.texts)
        self._added = files

    def next_turn(self) -> Turn:
        """Edits, additions and deletions that are spread over the tree as the last turn left it."""
        *edited, deleted = self._draw.sample(self._live, EDITS + DELETIONS)
        self._live.remove(deleted)
        additions = {self._new_path(): self._text() for _ in range(ADDITIONS)}
        self._live += additions
        return Turn({path: self._draw.choice(self._lines) for path in edited}, additions, (deleted,))

    def _new_path(self) -> str:
        self._added += 1
        folder = self._draw.randrange(len(self.texts) // FILES_PER_FOLDER)
        return f"{_folder(folder)}/new{self._added}.txt"

    def _text(self) -> str:
        return "\n".join(self._draw.choices(self._lines, k=self._lines_per_file)) + "\n"

    def _vocabulary(self) -> list[str]:
        words = [
            "".join(self._draw.choices("etaoinshrdlucmfw_", k=self._draw.randint(2, 10)))
            for _ in range(_WORDS)
        ]
        return [" ".join(self._draw.choices(words, k=_WORDS_PER_LINE)) for _ in range(_LINES)]


def _folder(number: int) -> str:
    return f"folder{number:04}"


def _path(number: int) -> str:
    return f"{_folder(number // FILES_PER_FOLDER)}/file{number % FILES_PER_FOLDER:02}.txt"
