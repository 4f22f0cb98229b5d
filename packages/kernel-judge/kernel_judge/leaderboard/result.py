"""Results of a leaderboard: a verdict with the code and the task, which the judge may sign.

A file has either the object of `judge --json`, or that of `judge --sign`: "verdict", "candidate", "task" and
"signature", whose content is `_KIND` and the object without it as JSON with sorted keys. Nothing in a file is trusted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kernel_format.errors import ConfigError
from kernel_format.files import temporary_directory, write_files
from kernel_format.signatures import PrivateKey, Signers, is_signed_by, key_bundle
from kernel_format.untrusted_paths import checked_tree
from kernel_judge.judge.candidate import frozen
from kernel_judge.judge.candidate_files import candidate_digest, files_of
from kernel_judge.judge.verdict import Verdict, cause
from kernel_judge.search.local_judge import JUDGE_COMMAND, LocalJudge
from kernel_tasks import read_task

VALID, INVALID, UNSIGNED, UNKNOWN_KEY = "valid", "invalid", "unsigned", "by an unknown key"
_KIND = b"kernel-builder judge result\n"  # so that no signature of a package, which is of JSON, is one of a result
_MOST_BYTES, _MOST_DEPTH, _MOST_FIGURE = 4 << 20, 32, 1e15
_SECONDS = 900  # the longest second judgement


@dataclass(frozen=True)
class Result:
    """A judged candidate. `files` are those of the candidate and of the task, each below the path's first name."""

    verdict: Verdict
    candidate: str
    files: Mapping[str, Mapping[str, str]]
    log: str
    signature: str  # VALID, INVALID, UNSIGNED or UNKNOWN_KEY
    content: bytes  # of its file

    @property
    def code(self) -> Mapping[str, str]:
        """The candidate's files."""
        return self.files.get("candidate", {})

    def unpacked(self, part: str, directory: Path) -> Path:
        """Write the candidate or the task to an empty directory, and return its path.

        Raises:
            ConfigError: If the result does not have it.
        """
        files = self.files.get(part)
        if not files:
            raise ConfigError(f"has no {part}", where=self.candidate, hint="write results with `judge --sign KEY`")
        write_files(directory, files)
        names = {name.partition("/")[0] for name in files}
        return min((directory / name for name in names), key=lambda path: path.suffix == ".toml")


def signed_result(verdict: Verdict, candidate: Path, task: Path, key: PrivateKey) -> str:
    """Return a verdict with the candidate and the task as a signed JSON object on one line."""
    with frozen(candidate) as copy:
        texts = texts_of(copy)
        if candidate_digest(copy) != verdict.candidate_digest:
            raise ConfigError("is not the candidate that was judged", where=str(candidate), hint="judge it again")
    content = {"verdict": verdict.as_dict(), "candidate": texts, "task": texts_of_task(task)}
    return json.dumps({**content, "signature": json.loads(key_bundle(_KIND + _canonical(content), key))})


def texts_of_task(task: Path) -> dict[str, str]:
    """Return the texts of all files of a task; a format may have some of them in other directories."""
    with temporary_directory() as directory:
        read_task(task).save(directory)
        return {name: text for entry in directory.iterdir() for name, text in texts_of(entry).items()}


def texts_of(path: Path, errors: str = "strict") -> dict[str, str]:
    """Return the texts of a file, or of a directory's files without links, by their paths from the parent on."""
    path = path.absolute()
    try:
        files = files_of(path) if path.is_dir() else [path]
        return {file.relative_to(path.parent).as_posix(): read_file(file).decode(errors=errors) for file in files}
    except UnicodeDecodeError as error:
        raise ConfigError("has a file that is not text", where=str(path), hint="sign results of text files") from error


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def read_results(directory: Path, signers: Signers) -> tuple[list[Result], list[str]]:
    """Return the results of the files NAME.json in a directory, without following links, and why others are none."""
    results, faults = [], []
    for path in sorted(directory.glob("*.json")):
        try:
            results.append(_read_result(path, signers))
        except Exception as error:  # anyone may have written the file
            faults.append(f"{path}: is not a result: {'it has no ' * isinstance(error, KeyError)}{str(error)[:200]}")
    return results, faults


def _read_result(path: Path, signers: Signers) -> Result:
    content = read_file(path)
    entry = json.loads(content)
    _check_depth(entry, _MOST_DEPTH)
    whole = entry if isinstance(entry.get("verdict"), Mapping) else {"verdict": entry}
    parts = {part: dict(whole.get(part, {})) for part in ("candidate", "task")}
    for files in parts.values():
        checked_tree(files)
        "".join(files.values()).encode()
    verdict = Verdict.from_dict(whole["verdict"])
    _check_types(verdict)
    name = min((name.partition("/")[0] for name in parts["candidate"]), default=path.stem)
    result = Result(verdict, name, parts, "", _signature(whole, signers), content)
    return result if _has_judged_code(result) else replace(result, signature=INVALID)


def _check_depth(value: Any, left: int) -> None:
    if not left:
        raise ValueError(f"it is nested in more than {_MOST_DEPTH} levels")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, left - 1)


def _check_types(verdict: Verdict) -> None:
    texts = (verdict.task, verdict.task_digest, verdict.candidate_digest, verdict.device, verdict.sandbox)
    if not all(isinstance(text, str) for text in (*texts, verdict.reason, *verdict.suspicious)):
        raise ValueError("expected texts")
    figures = [figure for speed in verdict.speed.values() for figure in speed]
    figures += [figure for figure in (verdict.share_of_limit, verdict.sol_score, verdict.seconds) if figure is not None]
    if not all(type(figure) in (int, float) and 0 <= figure < _MOST_FIGURE for figure in figures):
        raise ValueError(f"expected figures from 0 to {_MOST_FIGURE:.0e}")
    if not isinstance(verdict.cases, list):
        raise TypeError("expected a list of cases")
    verdict.lines()  # which the page shows


def read_file(path: Path, tail: int | None = None) -> bytes:
    """Return the content of a regular file of at most 4 MiB, or the end of any, which must not be a link.

    Raises:
        ConfigError: If it is another kind of file, or larger.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or (tail is None and status.st_size > _MOST_BYTES):
                raise ConfigError("is not a regular file of at most 4 MiB", where=str(path), hint="remove it")
            file.seek(max(status.st_size - (tail or _MOST_BYTES), 0))
            return file.read(tail or _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), hint="use a regular file") from error


def _signature(entry: Mapping[str, Any], signers: Signers) -> str:
    bundle = entry.get("signature")
    if bundle is None:
        return UNSIGNED
    content = _canonical({key: value for key, value in entry.items() if key != "signature"})
    try:
        stated = base64.b64decode(bundle["messageSignature"]["messageDigest"]["digest"])
    except (KeyError, TypeError, ValueError):
        return INVALID
    if stated == hashlib.sha256(content).digest():
        raise ValueError("the signature is an earlier version's or a package's; judge the candidate again")
    if is_signed_by(bundle, _KIND + content, signers.keys):
        return VALID
    is_of_content = stated == hashlib.sha256(_KIND + content).digest()
    return UNKNOWN_KEY if is_of_content and not signers.keys else INVALID


def _has_judged_code(result: Result) -> bool:
    if not result.code:
        return True
    with temporary_directory() as directory:
        return candidate_digest(result.unpacked("candidate", directory)) == result.verdict.candidate_digest


def ranked(results: Sequence[Result], *, only_valid: bool) -> dict[tuple[str, str, str], list[Result]]:
    """Return the right results by task, its digest and device, the fastest first, each candidate once."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    accepted = {VALID} if only_valid else {VALID, UNSIGNED, UNKNOWN_KEY}
    for result in sorted(results, key=lambda result: (-result.verdict.ratio, result.content)):
        verdict = result.verdict
        if verdict.is_right and result.signature in accepted:
            group = groups.setdefault((verdict.task, verdict.task_digest, verdict.device), [])
            if all(other.verdict.candidate_digest != verdict.candidate_digest for other in group):
                group.append(result)
    return dict(sorted(groups.items()))


class Comparison(NamedTuple):
    """Whether a second judgement agrees with a result, and both in one line."""

    agrees: bool
    text: str


def judge_again(results: Sequence[Result], count: int, command: Sequence[str] = JUDGE_COMMAND) -> Iterator[Comparison]:
    """Judge the `count` fastest results of each task and device again, of those with a valid signature.

    Others could run any code here: a task's code runs outside of the sandbox.

    A second verdict agrees if it is the same word and the intervals of the speeds relative to eager overlap.

    Raises:
        ConfigError: If a result does not have its code or its task.
    """
    for group in ranked(results, only_valid=True).values():
        for result in group[:count]:
            yield _judge_again(result, command)


def _judge_again(result: Result, command: Sequence[str]) -> Comparison:
    with temporary_directory() as scratch:
        paths = {}
        for part in ("candidate", "task"):
            (directory := scratch / part).mkdir()
            paths[part] = result.unpacked(part, directory)
        judged = LocalJudge(paths["task"], seconds=_SECONDS, command=command).judge(paths["candidate"])
    first, second = result.verdict, judged.verdict
    about = f"{result.candidate}, {first.task}"
    if second is None:
        return Comparison(False, f"does not agree: {about}: {cause(judged.error or '')}")
    agrees = (second.verdict, second.task_digest) == (first.verdict, first.task_digest)
    before, now = first.speed.get("eager"), second.speed.get("eager")
    if before and now:
        agrees &= before.low <= now.high and now.low <= before.high
    word = "agrees" if agrees else "does not agree"
    return Comparison(agrees, f"{word}: {about}: {_summary(second)}, before {_summary(first)}")


def _summary(verdict: Verdict) -> str:
    speed = verdict.speed.get("eager")
    return f"{f'{speed} times eager' if speed else verdict.verdict} on {verdict.device}"
