"""A publication warns of a card that says what nobody wrote, or what the API does not have."""

from __future__ import annotations

from pathlib import Path

from kernel_builder import scaffold
from kernel_builder.config.project_files import read_project
from kernel_builder.hub import card_review
from kernel_builder.hub.package_api import Api, ApiMember, read

CARD = """# gates
```python
from kernels import get_kernel
gates = get_kernel("me/gates", version=1)
y = gates.swiglu(x) + gates.layers.SwiGlu().forward(x)
```
`gates.geglu(x)` is other.gates.nothing, in gates.md; `gates.layers.Gone` replaces it. gates.absent is no code.
"""


def _findings(directory: Path, api: Api | None = None) -> list[str]:
    return list(card_review.findings(read_project(directory), api or read(directory / "torch-ext" / "gates")))


def test_what_init_wrote(tmp_path: Path) -> None:
    project = scaffold.create(tmp_path / "a", "me/gates", ["cpu"], licence="mit", operator="swiglu")
    assert [line.partition(":")[0] for line in _findings(project)] == [
        "CARD.md", "CARD.md", "layers.Swiglu", "swiglu",
    ]  # fmt: skip
    # A ReLU may say that it is one; another function may not.
    project = scaffold.create(tmp_path / "b", "me/gates", ["cpu"], licence="mit")
    assert _findings(project) == []
    softmax = Api({"softmax": ApiMember("function"), "layers": ApiMember("module")}, {})
    said = "\n".join(_findings(project, softmax))
    assert "'ReLU, forward and backward, for float32, float16 and bfloat16.' is the text of `init`" in said
    assert "names relu, which" in said and "names layers.ReLU, which" in said


def test_names_that_the_api_lacks(tmp_path: Path) -> None:
    project = scaffold.create(tmp_path / "a", "me/gates", ["cpu"], licence="mit", operator="swiglu")
    (project / "CARD.md").write_text(CARD)
    members = {"swiglu": ApiMember("function"), "layers": ApiMember("module"), "layers.SwiGlu": ApiMember("class")}
    assert [line.split()[2] for line in _findings(project, Api(members, {}))] == ["geglu,", "layers.Gone,"]
