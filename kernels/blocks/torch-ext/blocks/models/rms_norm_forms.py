"""What the RMSNorms of transformers compute, for forwards that compute them together with their neighbours."""

from dataclasses import dataclass
from functools import cache
from typing import Optional

from torch import Tensor, nn

from ..kernel_set import rmsnorm
from ..replacements import is_own, path_of
from .torch_norms import weight_for


@dataclass(frozen=True)
class NormForm:
    """What a class of RMSNorm computes.

    Attributes:
        eps: The name of the attribute that has the eps.
        offset: As in `rmsnorm.rms_norm`.
        rounding: As in `rmsnorm.rms_norm`.
    """

    eps: str
    offset: float
    rounding: str

    def eps_of(self, norm: nn.Module) -> float:
        return getattr(norm, self.eps)


_LLAMA = NormForm("variance_epsilon", 0.0, "before_weight")
_OLMO = NormForm("variance_epsilon", 0.0, "last")
_GEMMA = NormForm("eps", 1.0, "last")

_FORMS = {
    f"transformers.models.{model}.modeling_{model}.{prefix}RMSNorm": form
    for model, prefix, form in (
        ("llama", "Llama", _LLAMA),
        ("mistral", "Mistral", _LLAMA),
        ("phi3", "Phi3", _LLAMA),
        ("qwen2", "Qwen2", _LLAMA),
        ("qwen3", "Qwen3", _LLAMA),
        ("olmo2", "Olmo2", _OLMO),
        ("gemma2", "Gemma2", _GEMMA),
        ("gemma3", "Gemma3", _GEMMA),
    )
}


@cache
def _form_of_class(cls: type) -> Optional[NormForm]:
    return _FORMS.get(path_of(cls))


def form_of(norm: nn.Module) -> Optional[NormForm]:
    """Return what `norm` computes, or None if it must be called: another class, or hooks, or another forward."""
    form = _form_of_class(type(norm))
    return form if form is not None and is_own(norm, type(norm)) else None


def add_norm(form: NormForm, norm: nn.Module, branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return `norm(residual + branch)` and the sum."""
    if branch.dtype != residual.dtype:
        total = residual + branch
        return norm(total), total
    weight = weight_for(norm.weight, branch)
    return rmsnorm.add_rms_norm(branch, residual, weight, form.eps_of(norm), form.offset, form.rounding)
