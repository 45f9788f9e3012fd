"""Levels of modules, and the paths through them (DiPaCo, arXiv:2403.10616, section 2).

A model has L levels; level l has K_l modules of the same shape. A path takes one module of each
level, so there are K_1 * ... * K_L paths. Modules are numbered level by level, paths in the order
of their modules, the last level fastest. With `copies` there are several paths with the same
modules, next to each other: they differ in their documents only, as the members of DiLoCo do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError


def weights_name(path: int) -> str:
    """Return the name of the file with a path's weights."""
    return f"path-{path:04d}.safetensors"


@dataclass(frozen=True, slots=True)
class PathLayout:
    """The modules of each level; see the module's docstring."""

    modules: tuple[int, ...]
    copies: int = 1

    @classmethod
    def of(cls, modules: Sequence[int], *, copies: int = 1) -> PathLayout:
        """Return the layout of so many modules per level, and paths with the same modules.

        Raises:
            ConfigError: there is no level, or one without a module.
        """
        if not modules or min(modules) < 1:
            raise ConfigError(
                "every level of a modular model has a module or more",
                given=f"modules = {list(modules)} in [dipaco]",
                expected="a number of 1 or more for each level",
                remedy="modules = [2, 2] has two levels of two modules, which are 4 paths",
            )
        return cls(tuple(modules), copies)

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.modules)

    @property
    def num_modules(self) -> int:
        """Modules of all levels."""
        return sum(self.modules)

    @property
    def num_paths(self) -> int:
        """Paths through the model."""
        return math.prod(self.modules) * self.copies

    def level_of(self, module: int) -> int:
        """Return the level of a module, from 0."""
        for level, count in enumerate(self.modules):
            if module < count:
                return level
            module -= count
        raise ValueError(f"there is no module {module}")

    def modules_of(self, path: int) -> tuple[int, ...]:
        """Return the numbers of a path's modules, ascending: one of each level."""
        found, after, path = [], self.num_modules, path // self.copies
        for count in reversed(self.modules):
            after -= count
            path, own = divmod(path, count)
            found.append(after + own)
        return tuple(reversed(found))

    def paths_through(self, module: int) -> list[int]:
        """Return the paths that take a module, ascending."""
        return [path for path in range(self.num_paths) if module in self.modules_of(path)]

    def modules_in(self, paths: Sequence[int]) -> list[int]:
        """Return the modules of some paths, ascending, each once."""
        return sorted({module for path in paths for module in self.modules_of(path)})
