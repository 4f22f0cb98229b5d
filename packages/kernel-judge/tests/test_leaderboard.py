"""The leaderboard: signatures, ranks, the page's bytes, hostile texts, and second judgements."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from searches import QUICK_JUDGE, write_task

from kernel_builder import toml_file
from kernel_format.errors import ConfigError
from kernel_format.signatures import Signers, key_bundle
from kernel_judge.judge.candidate_files import candidate_digest
from kernel_judge.judge.verdict import Speedup, Verdict
from kernel_judge.leaderboard.result import judge_again, read_results, signed_result
from tests.support.cli import expect

KEY = Ed25519PrivateKey.generate()
SIGNERS = Signers(keys=(KEY.public_key(),))
HOSTILE = "</pre></code><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
CASE = {
    "shapes": [[8192, 2048]],
    "bytes": 134_225_920,
    "operations": 0,
    "milliseconds": {"candidate": 0.05, "eager": 0.13, "compile": 0.06},
    "limit": {"milliseconds": 0.045, "gigabytes-per-second": 2983.0},
}
PRODUCT = CASE | {
    "milliseconds": {"candidate": 0.21, "eager": 0.4, "compile": 0.31},
    "operations": 2 * 4096**3,
    "bytes": 6 * 4096**2,
    "limit": {"milliseconds": 0.196, "gigabytes-per-second": 2983.0, "gigaflops": 7e5},
}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the signed result of a right candidate to DIR/results."""
    directory = tmp_path / "results"
    directory.mkdir()

    def written(name: str, ratio: float, code: str = "", **changes: Any) -> Path:
        (tmp_path / name).mkdir()
        candidate = tmp_path / name / f"{name}.py"
        candidate.write_text(f"# right {ratio}\n{code}\n")
        digest = candidate_digest(candidate)
        facts = ("right", "", None, None, "hard_swish_steps", "0" * 64, digest, "process", "none", 1.0)
        speed = {"eager": Speedup(ratio, ratio * 0.98, ratio * 1.02)}
        verdict = Verdict(*facts, speed, share_of_limit=0.9, sol_score=0.95, cases=[CASE, PRODUCT])
        result = directory / f"{name}.json"
        result.write_text(signed_result(replace(verdict, **changes), candidate, write_task(tmp_path), KEY))
        return result

    return written


def changed(path: Path, **values: Any) -> None:
    entry = json.loads(path.read_text())
    entry["verdict"] |= values
    path.write_text(json.dumps(entry))


def test_a_changed_result_is_invalid_and_not_ranked(write: Write, tmp_path: Path) -> None:
    """Also without the judge's key: a signature names the digest of its content."""
    write("honest", 2.0)
    changed(write("forged", 1.5), speed={"eager": {"ratio": 9.0, "low": 9.0, "high": 9.0}})
    stripped = write("stripped", 3.0)
    stripped.write_text(
        json.dumps({key: v for key, v in json.loads(stripped.read_text()).items() if key != "signature"})
    )
    other_code = write("other-code", 4.0)
    other_code.write_text(other_code.read_text().replace("# right 4.0", "# right 5.0"))
    public = tmp_path / "judge.pub"
    ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(KEY.public_key().public_bytes(*ssh))
    known = {result.candidate: result.signature for result in read_results(tmp_path / "results", SIGNERS)[0]}
    assert known == {"honest.py": "valid", "stripped.py": "unsigned"} | dict.fromkeys(
        ("forged.py", "other-code.py"), "invalid"
    )
    unknown = {result.candidate: result.signature for result in read_results(tmp_path / "results", Signers())[0]}
    assert unknown == known | {"honest.py": "by an unknown key"}
    ranks = []
    for signer in ((), ("--signer", public)):
        expect(0, "", "report", "--leaderboard", tmp_path / "results", *signer, "--out", tmp_path / "site")
        page = (tmp_path / "site" / "index.html").read_text()
        ranks.append([name for name in known if f"rank 1: {name}" in page or f"rank 2: {name}" in page])
        assert "wrong" not in page and 'class="bad">invalid' in page
    assert ranks == [["honest.py", "stripped.py"], ["honest.py"]]


@pytest.mark.attack
def test_signatures_of_packages_and_of_earlier_versions_are_refused(write: Write, tmp_path: Path) -> None:
    """A package's metadata can have any keys: both signatures are of the bare JSON."""
    path = write("package", 9999.0)
    metadata = {key: value for key, value in json.loads(path.read_text()).items() if key != "signature"}
    bundle = key_bundle(json.dumps(metadata, sort_keys=True).encode(), KEY)
    path.write_text(json.dumps({**metadata, "signature": json.loads(bundle)}))
    for signers in (SIGNERS, Signers()):
        results, faults = read_results(tmp_path / "results", signers)
        assert not results and "an earlier version's or a package's; judge the candidate again" in faults[0]


def test_the_page_can_be_built_again_from_its_results(write: Write, tmp_path: Path) -> None:
    for name, ratio in (("slow", 1.1), ("fast", 2.5), ("middle", 2.0)):
        write(name, ratio)
    write("wrong", 1.0, verdict="wrong", reason="it is", speed={})
    expect(0, "", "report", "--leaderboard", tmp_path / "results", "--out", tmp_path / "one")
    expect(0, "", "report", "--leaderboard", tmp_path / "one" / "results", "--out", tmp_path / "two")
    files = [sorted(path for path in (tmp_path / site).rglob("*.*")) for site in ("one", "two")]
    assert len(files[0]) == 5
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    page = files[0][0].read_text()
    places = [page.index(f"rank {rank}: {name}.py") for rank, name in ((1, "fast"), (2, "middle"), (3, "slow"))]
    assert places == sorted(places) and "wrong: wrong.py" in page and "<svg" in page


@pytest.mark.parametrize("name", ["index.html", "notes.txt", "results/mine.json"])
def test_a_page_replaces_an_earlier_page_and_no_other_files(write: Write, tmp_path: Path, name: str) -> None:
    write("right", 2.0)
    arguments = ("report", "--leaderboard", tmp_path / "results", "--out", tmp_path / "site")
    for _ in range(2):
        expect(0, "", *arguments)
    (tmp_path / "site" / name).write_text("mine")
    expect(2, f"is no page of this version: it has {Path(name).name}", *arguments)
    assert (tmp_path / "site" / name).read_text() == "mine"


@pytest.mark.attack
def test_drawings_take_no_settings_of_the_current_directory(write: Write, tmp_path: Path) -> None:
    write("fast", 2.5)
    (tmp_path / "matplotlibrc").write_text("font.size: 40\n")
    program = "from kernel_builder.cli import main; main(['report', '--leaderboard', 'results', '--out', 'site'])"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    page = (tmp_path / "site" / "index.html").read_text()
    assert "<svg" in page and "40px" not in page


@pytest.mark.attack
def test_texts_of_candidates_are_no_markup(write: Write, tmp_path: Path) -> None:
    facts: dict[str, Any] = dict.fromkeys(("task", "device", "reason"), HOSTILE)
    facts |= {"suspicious": [HOSTILE], "missing_peers": {HOSTILE: "x"}}
    case = CASE | {"shapes": HOSTILE, "milliseconds": {HOSTILE: 1.0, "eager": 1.0, "candidate": float("inf")}}
    write("hostile", 2.0, HOSTILE + "\ud800".encode("utf-8", "replace").decode(), **facts, cases=[case, CASE])
    expect(0, "", "report", "--leaderboard", tmp_path / "results", "--out", tmp_path / "site")
    page = (tmp_path / "site" / "index.html").read_text()
    assert "&lt;script&gt;" in page and "<script" not in page and "<img" not in page


# Contents of files, and changes of a verdict, that are left out of the page.
NO_RESULTS = toml_file.read(Path(__file__).with_name("no_results.toml"))
CONTENTS = NO_RESULTS["contents"] | {"open brackets": "[" * 100_000, "large": " " * (5 << 20)}
CHANGES = NO_RESULTS["changes"] | {"huge": {"seconds": 10**4000}}


@pytest.mark.attack
def test_files_that_are_no_results_are_left_out_by_name(write: Write, tmp_path: Path) -> None:
    """Also links, and figures of shapes that cannot be drawn."""
    values = (float("nan"), float("inf"), 10**400, -1, True, "1", None, [], 1e-300)
    cases: list[Any] = [CASE | {key: value} for key in ("bytes", "operations", "limit") for value in values]
    cases = [CASE | {"milliseconds": {"eager": value}} for value in values] + cases + [CASE]
    write("honest", 2.0)
    write("odd", 1.5, cases=[*values, *cases[:8]])
    write("odder", 1.4, cases=cases[8:23])
    write("others", 1.3, cases=[*cases[23:], *[CASE] * 5000])
    directory = tmp_path / "results"
    for name, changes in CHANGES.items():
        changed(write(name, 1.0), **changes)
    for name, content in CONTENTS.items():
        (directory / f"{name}.json").write_text(content)
    (directory / "link.json").symlink_to(directory / "honest.json")
    (directory / "directory.json").mkdir()
    os.mkfifo(directory / "fifo.json")
    output = expect(2, "", "report", "--leaderboard", directory, "--out", tmp_path / "site").output
    named = re.findall(r"^warning: left out: .*/(.+)\.json: (?:is not a re|cannot be re)", output, re.MULTILINE)
    assert sorted(named) == sorted([*CHANGES, *CONTENTS, "link", "directory", "fifo"])
    page = (tmp_path / "site" / "index.html").read_text()
    assert [page.count(f"rank {n}:") for n in range(1, 6)] == [1, 1, 1, 1, 0] and page.count("<svg") == 1
    assert len(page) < 200_000


def test_a_second_judgement_agrees_if_the_intervals_overlap(write: Write, judge_calls: Path, tmp_path: Path) -> None:
    """The quick judge states the speed in the candidate's first line."""
    write("right", 2.0)
    write("exaggerated", 2.0, "# lucky", speed={"eager": Speedup(3.0, 2.9, 3.1)})
    write("slower", 1.2)
    results, _ = read_results(tmp_path / "results", SIGNERS)
    comparisons = list(judge_again(results, 2, command=QUICK_JUDGE))
    assert [comparison.agrees for comparison in comparisons] == [False, True]
    assert comparisons[1].text.startswith("agrees: right.py, hard_swish_steps: 2.00 (1.96 to 2.04) times eager")
    assert "does not agree: exaggerated.py" in comparisons[0].text and "before 3.00" in comparisons[0].text
    with pytest.raises(ConfigError, match="has no task"):
        list(judge_again([replace(results[0], files={"candidate": results[0].code})], 1))


@pytest.mark.attack
def test_the_task_of_an_unsigned_result_is_not_run(write: Write, tmp_path: Path) -> None:
    write("right", 2.0)
    assert list(judge_again(read_results(tmp_path / "results", Signers())[0], 1, QUICK_JUDGE)) == []
    arguments = ["--leaderboard", tmp_path / "results", "--judge-again", "1"]
    expect(2, "expected --signer beside --judge-again", "report", *arguments)


@pytest.mark.attack
def test_a_browser_shows_no_markup_of_candidates(write: Write, browser: Any, tmp_path: Path) -> None:
    write("hostile", 2.0, HOSTILE, task=HOSTILE)
    write("long-name-of-a-candidate-that-is-wider-than-a-telephone", 2.2, "x = 1" * 100)
    expect(0, "", "report", "--leaderboard", tmp_path / "results", "--out", tmp_path / "site")
    page = browser.new_page(viewport={"width": 375, "height": 800})
    page.goto((tmp_path / "site" / "index.html").as_uri())
    assert page.title() == "Leaderboard"
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    cells = page.evaluate("[...document.querySelectorAll('td')].map(cell => cell.getBoundingClientRect().right)")
    assert len(cells) == 14 and max(cells) <= 375, "each speed is seen without scrolling"
