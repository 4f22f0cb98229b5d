"""A publication warns of placeholders of `init` in a card, and of names that the API does not have."""

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


def test_placeholders_of_init(tmp_path: Path) -> None:
    project = scaffold.create(tmp_path / "a", "me/gates", ["cpu"], license_name="mit", operator="swiglu")
    assert [line.partition(":")[0] for line in _findings(project)] == [
        "CARD.md", "CARD.md", "layers.Swiglu", "swiglu",
    ]  # fmt: skip
    # Only a card of a ReLU may describe a ReLU.
    project = scaffold.create(tmp_path / "b", "me/gates", ["cpu"], license_name="mit")
    assert _findings(project) == []
    softmax = Api({"softmax": ApiMember("function"), "layers": ApiMember("module")}, {})
    text = "\n".join(_findings(project, softmax))
    assert "'ReLU, forward and backward, for float32, float16 and bfloat16.' is text of `init`" in text
    assert "does not have relu:" in text and "does not have layers.ReLU:" in text


def test_names_that_the_api_lacks(tmp_path: Path) -> None:
    project = scaffold.create(tmp_path / "a", "me/gates", ["cpu"], license_name="mit", operator="swiglu")
    (project / "CARD.md").write_text(CARD)
    members = {"swiglu": ApiMember("function"), "layers": ApiMember("module"), "layers.SwiGlu": ApiMember("class")}
    assert [line.split()[6] for line in _findings(project, Api(members, {}))] == ["geglu:", "layers.Gone:"]
