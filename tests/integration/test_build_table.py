"""The table of a pull request: its content, and hostile results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from kernel_builder.github.build_table import BuildResults, BuildRow, JobFailure, markdown, read_results


def package(variant: str, size: object = 2**20, **more: Any) -> dict[str, Any]:
    return {"project": "relu", "variant": variant, "status": "built", "bytes": size, "shares-binary-with": []} | more


def write(directory: Path, name: str, content: object) -> None:
    file = directory / name / f"{name}.json"
    file.parent.mkdir(parents=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_table_has_every_variant_with_its_size(tmp_path: Path) -> None:
    missing = {"project": "relu", "variant": "torch-b", "reason": "this machine is x86_64-linux", "hint": ""}
    never = {"project": "relu", "variant": "torch-c", "reason": "no such CUDA", "hint": ""}
    first = package("torch-a", 3 * 2**19, **{"shares-binary-with": ["torch-d"]})
    write(tmp_path, "results-relu-cpu-x86_64-linux", {"packages": [first], "unavailable": [missing, never]})
    write(tmp_path, "results-relu-cpu-aarch64-linux", {"packages": [package("torch-b")], "unavailable": []})
    failed = {"error": "BuildError", "message": "g++ failed", "where": "relu/relu.cpp", "hint": "read it"}
    write(tmp_path, "results-sum-cpu-x86_64-linux", failed)
    assert markdown(read_results(tmp_path)).splitlines() == [
        "**2 variants built, 2.50 MiB; 1 not built; 1 job failed**",
        "",
        "- `results-sum-cpu-x86_64-linux` failed: `relu/relu.cpp: g++ failed`",
        "- `relu` `torch-c` `not built`: `no such CUDA`",
        "",
        "| project | variant | status | size | binary shared with |",
        "| --- | --- | --- | ---: | --- |",
        "| `relu` | `torch-a` | `built` | 1.50 MiB | `torch-d` |",
        "| `relu` | `torch-b` | `built` | 1.00 MiB |  |",
    ]


def test_a_job_that_built_a_part_shows_its_errors_too(tmp_path: Path) -> None:
    first = {"error": "BuildError", "message": "g++ failed", "where": "relu/a.cpp", "output": "a.cpp:1: error: no"}
    second = first | {"where": "relu/b.cpp", "output": "b.cpp:1: error: no"}
    failed = {"project": "relu", "errors": [first, second]}
    failures = [failed | {"variant": variant} for variant in ("torch-b", "torch-c")]
    several = {"error": "SeveralErrors", "message": "relu/a.cpp: g++ failed; relu/b.cpp: g++ failed", "output": []}
    result = several | {"packages": [package("torch-a")], "failures": failures, "unavailable": []}
    write(tmp_path, "results-relu-cpu-x86_64-linux", result)
    assert markdown(read_results(tmp_path)).splitlines()[:11] == [
        "**1 variant built, 1.00 MiB; 2 not built; 1 job failed**",
        "",
        "- `results-relu-cpu-x86_64-linux` failed: `relu/a.cpp: g++ failed; relu/b.cpp: g++ failed`",
        "",
        "  ~~~",
        "  a.cpp:1: error: no",
        "  b.cpp:1: error: no",
        "  ~~~",
        "",
        "- `relu` `torch-b` `failed`: `g++ failed; g++ failed`",
        "- `relu` `torch-c` `failed`: `g++ failed; g++ failed`",
    ]


HOSTILE = (
    "a | b",
    "` <img src=x onerror=alert(1)> `",
    "``` @everyone #1 https://evil.example [click](javascript:1)",
    "\\` \\| x",
    "one\n\n# two\r\n| three |",
    "\u202eright to left\x00\x1b[31m",
    "<!-- kernel-builder: packages -->",
    "x" * 10_000,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_leaves_its_cell_or_its_code_span(tmp_path: Path, text: str) -> None:
    everywhere = package(text, project=text, status=text, **{"shares-binary-with": [text]})
    unavailable = {"project": text, "variant": f"2{text}", "reason": text}
    write(tmp_path, "results-a", {"packages": [everywhere], "unavailable": [unavailable]})
    write(tmp_path, "results-b", {"message": text, "where": text})
    shown = markdown(read_results(tmp_path))
    lines = shown.splitlines()
    assert len(lines) == 8
    assert all(line.isprintable() for line in lines)
    outside = [re.sub(r"`[^`]+`", "C", line) for line in lines]
    assert outside[2:4] == ["- C failed: C", "- C C C: C"]
    assert outside[7] == "| C | C | C | 1.00 MiB | C |"
    assert max(map(len, lines)) < 1500
    read = [token for block in MarkdownIt().enable("table").parse(shown) for token in (block, *(block.children or ()))]
    assert not {"link_open", "image", "html_block", "html_inline", "heading_open", "fence"} & {
        token.type for token in read
    }
    assert sum(token.type == "code_inline" for token in read) == 2 + 4 + 4


@pytest.mark.parametrize("text", HOSTILE)
def test_the_compilers_output_stays_in_its_block(tmp_path: Path, text: str) -> None:
    output = "\n".join(["relu.cpp:1: error", text, "~~~", " ~~~~", "# heading", "- ~~~", *["more"] * 99])
    write(tmp_path, "results-b", {"message": "g++ failed", "where": "relu.cpp", "output": output})
    shown = markdown(read_results(tmp_path))
    read = MarkdownIt().parse(shown)
    (block,) = (token for token in read if token.type == "fence")
    assert {token.type for token in read} <= {
        *("paragraph_open", "paragraph_close", "inline", "fence"),
        *("bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"),
    }
    assert block.content.startswith("relu.cpp:1: error\n")
    assert "\n# heading\n- ---\nmore\n" in block.content
    assert block.content.count("\n") == 20


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"packages": ',
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        '{"packages": []}' + " " * (5 * 2**20),
    ],
)
def test_a_file_that_is_no_result_is_a_failed_job(tmp_path: Path, content: str) -> None:
    write(tmp_path, "results-a", content)
    assert read_results(tmp_path) == BuildResults((), {"results-a": JobFailure("no result: the job ended early")})


def test_links_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps({"packages": [package("torch-a")]}))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "link.json").symlink_to(tmp_path / "secret")
    assert read_results(tmp_path / "results").rows == ()


def test_a_long_table_is_cut_to_what_a_comment_holds() -> None:
    rows = tuple(BuildRow("relu", f"torch-{number}", "built", 1) for number in range(5000))
    text = markdown(BuildResults(rows))
    assert 55_000 < len(text) < 65_536
    assert re.search(r"\n\n\d+ more lines: see the run's summary.\n$", text)
