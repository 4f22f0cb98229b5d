//! A vendored crate, as `cargo vendor` writes them.

/// Write `factor * input` to `out`.
pub fn scale(out: &mut [f32], input: &[f32], factor: f32) {
    assert_eq!(out.len(), input.len());
    for (out, x) in out.iter_mut().zip(input) {
        *out = factor * x;
    }
}
