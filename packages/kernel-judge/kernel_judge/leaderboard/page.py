"""The page of judged results: for each task and device a table, a roofline, and the code.

The same results give the same bytes. All texts are the candidates' and are escaped; the page runs no script, and loads
nothing.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from kernel_format.errors import ConfigError
from kernel_format.files import replaced_directory, write_files
from kernel_judge.leaderboard.result import INVALID, UNSIGNED, Result, ranked, read_file, texts_of
from kernel_judge.leaderboard.roofline import roofline
from kernel_judge.search.run_report import RunReport

_DRAWN, _CASES = 8, 16  # candidates in a roofline, and timed shapes of each
_LOG_BYTES = 20_000  # of the end of an agent's output
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:0 1rem 3rem;color:#1c1917}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}svg{width:100%;max-width:42rem}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #e7e5e4;vertical-align:top}
td:nth-child(n+3){white-space:nowrap}pre{overflow-x:auto;background:#f5f5f4;padding:.6rem;font-size:13px}
code,h1,h2,p,summary,td{overflow-wrap:anywhere}.bad{color:#b91c1c}.small{color:#57534e;font-size:13px}
@media(max-width:50rem){th{display:none}td:nth-child(n){display:flex;gap:1rem;justify-content:space-between;white-space:normal}
td::before{content:attr(title);color:#57534e}td:first-child{border-top:2px solid #1c1917}}
"""
_MARK = '<meta name="generator" content="kernel-builder report">'
_WRITTEN = re.compile(r"index\.html|results(/[0-9a-f]{16}\.json)?")  # the paths of a page's files
_COLUMNS = ("rank", "candidate", "times eager (interval)", "times compile", "share of limit", "SOL score", "signature")


def write_site(results: Sequence[Result], target: Path, title: str, *, only_valid: bool = False) -> None:
    """Write `index.html` and the results' files, from which anyone can rebuild it, in place of an earlier page.

    Args:
        only_valid: Rank only results with a valid signature.

    Raises:
        ConfigError: If the directory has other files.
    """
    is_site = (target / "index.html").is_file() and _MARK in (target / "index.html").read_text("utf-8", "replace")
    for path in target.rglob("*"):
        if not (is_site and _WRITTEN.fullmatch(path.relative_to(target).as_posix())):
            hint = "name a new or empty directory with --out, or move the file"
            raise ConfigError(f"is no page of this version: it has {path.name}", where=str(target), hint=hint)
    results = sorted(results, key=lambda result: result.content)
    groups = ranked(results, only_valid=only_valid)
    placed = {id(result) for group in groups.values() for result in group}
    parts = [_group(task, device, group) for (task, _, device), group in groups.items()]
    if others := [result for result in results if id(result) not in placed]:
        parts.append(f"<h2>Not ranked</h2>{''.join(_details(result, None) for result in others)}")
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{_MARK}<title>{_text(title)}</title>'
    page += '<meta name="viewport" content="width=device-width,initial-scale=1">'
    page += f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{_STYLE}</style></head>'
    page += f"<body><h1>{_text(title)}</h1>{''.join(parts) or '<p>There are no results.</p>'}</body></html>\n"
    files = {f"results/{hashlib.sha256(result.content).hexdigest()[:16]}.json": result.content for result in results}
    with replaced_directory(target) as directory:
        (directory / "results").mkdir()
        write_files(directory, {"index.html": page, **files})


def _group(task: str, device: str, group: Sequence[Result]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(_row(rank, result) for rank, result in enumerate(group, 1))
    cases = [case for result in group[:_DRAWN] for case in result.verdict.cases[:_CASES]]
    table = f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    details = "".join(_details(result, rank) for rank, result in enumerate(group, 1))
    return f"<h2>{_text(task)}</h2><p>{_text(device)}</p>{table}{roofline(cases)}{details}"


def _row(rank: int, result: Result) -> str:
    verdict = result.verdict
    cells = [str(rank), result.candidate, *(str(verdict.speed.get(peer, "-")) for peer in ("eager", "compile"))]
    cells += [f"{verdict.share_of_limit:.0%}" if verdict.share_of_limit is not None else "-"]
    cells += [f"{verdict.sol_score:.2f}" if verdict.sol_score is not None else "-"]
    cells += [result.signature + (", suspicious" if verdict.suspicious else "")]
    titled = [f'<td title="{title}">{_text(cell)}</td>' for title, cell in zip(_COLUMNS, cells, strict=True)]
    return f"<tr>{''.join(titled)}</tr>"


def _details(result: Result, rank: int | None) -> str:
    verdict = result.verdict
    word = verdict.verdict if rank is None else f"rank {rank}"
    kind = ' class="bad"' if result.signature == INVALID else ""
    about = f"{word}: {result.candidate}, {verdict.task}, {verdict.device}"
    facts = [*verdict.lines(), f"task SHA-256 {verdict.task_digest}", f"candidate SHA-256 {verdict.candidate_digest}"]
    listed = "".join(f"<li><code>{_text(fact)}</code></li>" for fact in facts)
    code = "".join(f"<p>{_text(name)}</p><pre>{_text(text)}</pre>" for name, text in sorted(result.code.items()))
    log = f"<p>Log</p><pre>{_text(result.log)}</pre>" if result.log else ""
    return (
        f"<details><summary>{_text(about)} (<span{kind}>{_text(result.signature)}</span>)</summary>"
        f'<ul class="small">{listed}</ul>{code}{log}</details>'
    )


def _text(text: str) -> str:
    # Lone halves of surrogate pairs, which JSON can have, are in no encoding.
    return html.escape(text.encode("utf-8", "replace").decode())


def run_results(report: RunReport) -> list[Result]:
    """Return the judged tries of searches with their code and the ends of their logs."""
    results = []
    for attempt in report.attempts:
        for each in attempt.tries:
            if each.verdict:
                name = f"attempt {attempt.number}, try {each.number}, {attempt.agent}"
                candidate, path = each.workspace.frozen_candidate(), each.workspace.log
                code = texts_of(candidate, errors="replace") if candidate else {}
                log = read_file(path, tail=_LOG_BYTES).decode(errors="replace") if path.exists() else ""
                content = json.dumps({"verdict": each.verdict.as_dict(), "candidate": code}, sort_keys=True).encode()
                results.append(Result(each.verdict, name, {"candidate": code}, log, UNSIGNED, content))
    return results
