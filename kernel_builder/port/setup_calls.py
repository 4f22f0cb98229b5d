"""The functions and methods of Python that a `setup.py` composes its arguments with, on known values.

None has an effect: files are only looked for, in the directory of the `setup.py`.
"""

from __future__ import annotations

import ast
import glob
import itertools
import operator
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_FILES = 5000


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would give."""

    line: int
    text: str


def facts(path: Path, cuda: bool) -> dict[str, Any]:
    """Return the values of names of libraries on a Linux machine, with or without CUDA."""
    home = Unknown(0, "CUDA_HOME") if cuda else None
    return {
        "CUDA_HOME": home,
        "cpp_extension.CUDA_HOME": home,
        "torch.utils.cpp_extension.CUDA_HOME": home,
        "ROCM_HOME": None,
        "IS_HIP_EXTENSION": False,
        "torch.version.hip": None,
        "torch.version.cuda": Unknown(0, "torch.version.cuda") if cuda else None,
        "torch.cuda.is_available": cuda,  # a call of it has this value
        "torch.backends.openmp.is_available": True,
        "sys.platform": "linux",
        "os.name": "posix",
        "os.environ": {},
        "os.sep": "/",
        "os.curdir": ".",
        "os.path.curdir": ".",
        "sys.argv": [path.name],
    }


def _text(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


class SetupCalls:
    """Calls of functions on known values; every other call gives the `Unknown` that the caller passes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        path = posixpath
        # By the last name: scripts import the same functions under many names.
        self._functions: Mapping[str, Callable[..., Any]] = {
            "join": path.join,
            "dirname": path.dirname,
            "basename": path.basename,
            "splitext": lambda name: list(path.splitext(name)),
            "abspath": self._absolute,
            "realpath": self._absolute,
            "normpath": path.normpath,
            "relpath": lambda name, start=".": path.relpath(self._absolute(name), self._absolute(start)),
            "exists": lambda name: path.exists(self._absolute(name)),
            "isdir": lambda name: path.isdir(self._absolute(name)),
            "isfile": lambda name: path.isfile(self._absolute(name)),
            "system": lambda *_: "Linux",  # of platform; that of os has no result that matters
            "getcwd": lambda: str(root),
            "parallel_info": lambda: "ATen parallel backend: OpenMP",  # of torch.__config__, as Torch's wheels say
            "Path": lambda *parts: path.join(*parts) if parts else ".",
            "PurePath": path.join,
            "getenv": lambda name, default=None: default,
            "str": str,
            "int": int,
            "len": len,
            "bool": bool,
            "list": list,
            "tuple": list,
            "set": lambda values=(): list(dict.fromkeys(values)),
            "dict": dict,
            "sorted": sorted,
            "range": lambda *bounds: list(range(*bounds)[:_MOST_FILES]),
            "product": lambda *lists: [list(combination) for combination in itertools.product(*lists)],
            "deepcopy": lambda value: value,
            "find_packages": lambda *_, **__: [],
        }

    def _absolute(self, name: str) -> str:
        return posixpath.normpath(self.root / name)

    def _files(self, pattern: str, under: str = "") -> list[str]:
        """Return the files of the project that match a pattern, written as the pattern is."""
        whole = posixpath.join(under, pattern) if under else pattern
        if not Path(self._absolute(whole)).is_relative_to(self.root):
            return []
        matches = glob.iglob(self._absolute(whole), recursive=True)  # noqa: PTH207 -- a script's patterns are glob's
        listed = sorted(itertools.islice(matches, _MOST_FILES))
        return listed if posixpath.isabs(whole) else [posixpath.relpath(file, self.root) for file in listed]

    def attribute(self, owner: Any, name: str, unknown: Unknown) -> Any:
        """Return an attribute of a path, the only objects with attributes that matter."""
        if isinstance(owner, str):
            stem = Path(owner)
            parts = {"parent": str(stem.parent), "name": stem.name, "stem": stem.stem, "suffix": stem.suffix}
            return parts.get(name, unknown)
        return unknown

    def call(self, name: str, owner: Any, arguments: list[Any], keywords: Mapping[str, Any], unknown: Unknown) -> Any:
        """Return the result of a function, or of a method of `owner`."""
        last = re.split(r"[.\s]", name)[-1]
        try:
            if owner is not None and not isinstance(owner, (Unknown, bool)):
                return self._method(owner, last, arguments, keywords, unknown)
            if last in ("glob", "iglob"):
                return self._files(arguments[0]) if isinstance(arguments[0], str) else unknown
            if last == "split" and "shlex" in name:
                return shlex.split(arguments[0])
            if last in self._functions and not any(isinstance(argument, Unknown) for argument in arguments):
                return self._functions[last](*arguments, **keywords)
        except Exception:
            return unknown  # the script itself may be wrong, or call with what is only known when it runs
        return unknown

    def _method(
        self, owner: Any, name: str, arguments: list[Any], keywords: Mapping[str, Any], unknown: Unknown
    ) -> Any:
        match owner, name:
            case list(), "append" | "insert" | "remove" | "extend" | "copy" | "reverse" | "sort" | "index" | "count":
                if name == "extend" and isinstance(arguments[0], Unknown):
                    return owner.append(arguments[0])
                return getattr(owner, name)(*arguments)
            case dict(), "get" | "setdefault" | "update" | "copy" | "pop":
                return getattr(owner, name)(*arguments, **keywords)
            case dict(), "items" | "keys" | "values":
                listed = getattr(owner, name)()
                return [list(pair) for pair in listed] if name == "items" else list(listed)
            case str(), "glob" | "rglob":
                return self._files(arguments[0] if name == "glob" else f"**/{arguments[0]}", owner)
            case str(), "resolve" | "absolute":
                return self._absolute(owner)
            case str(), "as_posix" | "expanduser":
                return owner
            case str(), "exists" | "is_dir" | "is_file":
                return getattr(Path(self._absolute(owner)), name)()
            case str(), "joinpath":
                return posixpath.join(owner, *arguments)
            case str(), "join":
                return owner.join(arguments[0])
            case str(), "split" | "replace" | "strip" | "lstrip" | "rstrip" | "lower" | "upper" | "format" | (
                "startswith"
            ) | "endswith" | "removeprefix" | "removesuffix" | "splitlines":
                return getattr(owner, name)(*(tuple(a) if isinstance(a, list) else a for a in arguments), **keywords)
        return unknown

    def operation(self, sign: ast.operator, left: Any, right: Any, unknown: Unknown) -> Any:
        """Return the result of an operator. A list keeps what is known beside an `Unknown`."""
        if isinstance(sign, ast.Add):
            if isinstance(left, list) or isinstance(right, list):
                parts = (side if isinstance(side, list) else [side] for side in (left, right))
                return [value for part in parts for value in part]
            if (isinstance(left, str) and isinstance(right, str)) or (_text(left) and _text(right)):
                return left + right if type(left) is type(right) else unknown
        if isinstance(sign, ast.Sub) and isinstance(left, list) and isinstance(right, list):
            return [value for value in left if value not in right]  # of sets, which are lists here
        if isinstance(sign, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return posixpath.join(left, right)  # of paths
        if isinstance(sign, ast.Mod) and isinstance(left, str) and not isinstance(right, Unknown):
            try:
                return left % (tuple(right) if isinstance(right, list) else right)
            except (TypeError, ValueError):
                return unknown
        return unknown

    def comparison(self, signs: Sequence[ast.cmpop], values: Sequence[Any], unknown: Unknown) -> Any:
        """Return the result of a comparison."""
        left, right = values[0], values[1]
        if isinstance(signs[0], (ast.Is, ast.IsNot)) and right is None:
            # What is not known is something: `CUDA_HOME is not None`.
            return (left is None) is isinstance(signs[0], ast.Is)
        if len(signs) > 1 or any(isinstance(side, Unknown) for side in (left, right)):
            return unknown
        functions = {
            ast.Eq: operator.eq,
            ast.NotEq: operator.ne,
            ast.Lt: operator.lt,
            ast.LtE: operator.le,
            ast.Gt: operator.gt,
            ast.GtE: operator.ge,
            ast.In: lambda member, holder: member in holder,
            ast.NotIn: lambda member, holder: member not in holder,
            ast.Is: operator.is_,
            ast.IsNot: operator.is_not,
        }
        try:
            return functions[type(signs[0])](left, right)
        except TypeError:
            return unknown
