//! Inputs for the kernels' tests.

/// `n` seeded numbers between `-size` and `size`.
pub(crate) fn numbers(size: f32, n: usize, seed: u32) -> Vec<f32> {
    let mut s = seed;
    (0..n)
        .map(|_| {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((s >> 8) as f32 / (1u32 << 23) as f32 - 1.0) * size
        })
        .collect()
}
