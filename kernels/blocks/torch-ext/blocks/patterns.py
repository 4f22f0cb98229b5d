"""Patterns of norms, modulations, gates and gated activations, by the places where their formulas round."""

from .matching import call, named, narrow, one_plus, tagged, wide

_x, _weight, _eps = named("x"), named("weight"), named("eps", number=True)
_any_weight, _any_bias = named("weight", optional=True), named("bias", optional=True)
_branch, _gate = named("branch"), named("gate")

_variance = call("mean", wide(_x) ** 2) + _eps  # of the last dimension, which is kept
_normalized = wide(_x) * (call("rsqrt", _variance) | _variance**-0.5)
_normalized |= wide(_x) / (call("sqrt", _variance) | _variance**0.5)
_WIDE_NORM = (  # before it is rounded to the dtype of x
    tagged("offset", (1 + wide(_weight)) * _normalized)
    | tagged("rms", wide(_weight) * _normalized)
    | tagged("rms", _normalized)
    | tagged("layer", call("layer_norm", wide(_x), wide(_any_weight), wide(_any_bias), _eps))
)
NORM = (
    narrow(_WIDE_NORM)
    | tagged("before_weight", _weight * narrow(_normalized))
    | tagged("layer", call("layer_norm", _x, _any_weight, _any_bias, _eps))
    | tagged("rms", call("rms_norm", _x, _any_weight, _eps))
)
_modulation = (one_plus(named("scale")), named("shift"))
MODULATED = {
    "each": NORM * _modulation[0] + _modulation[1],
    "last": narrow(_WIDE_NORM * _modulation[0] + _modulation[1]),
}
GATED = {"each": _x + _branch * _gate, "last": narrow(wide(_x) + wide(_branch) * _gate)}
ACTIVATED = {name: call(name, named("gate")) * named("up") for name in ("silu", "gelu")}
