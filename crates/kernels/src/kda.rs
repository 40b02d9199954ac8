//! Kimi Delta Attention, one token and head at a time: the recurrence, never a chunked form, so that a token's result
//! does not depend on how many tokens come with it.

use crate::functions::{exp, sigmoid, silu};
use crate::isa::multiversion;

/// State columns handled together; a column's sums never meet another column's.
const COLUMNS: usize = 32;

multiversion! {
    /// Depthwise causal convolution over time, then SiLU: `y[c] = silu(sum_j w[j][c] u[j][c])`, taps ascending, the last tap
    /// on the newest input. `taps` is `[K][channels]`, `inputs` the K rows oldest first.
    pub(crate) unsafe fn conv_silu(taps: &[f32], inputs: &[&[f32]], y: &mut [f32]) {
        let channels = y.len();
        y.fill(0.0);
        for (w, u) in taps.chunks_exact(channels).zip(inputs) {
            for ((y, w), u) in y.iter_mut().zip(w).zip(*u) {
                *y = w.mul_add(*u, *y);
            }
        }
        for y in y {
            *y = silu(*y);
        }
    }
}

multiversion! {
    /// Decay of each channel, in place: `alpha = exp(bound * sigmoid(rate[head] * (z + bias)))`, `rate = exp(A_log)`.
    pub(crate) unsafe fn decay(z: &mut [f32], bias: &[f32], rate: &[f32], bound: f32) {
        let head = z.len() / rate.len();
        for ((z, bias), rate) in z.chunks_exact_mut(head).zip(bias.chunks_exact(head)).zip(rate) {
            for (z, b) in z.iter_mut().zip(bias) {
                *z = exp(bound * sigmoid(rate * (*z + b)));
            }
        }
    }
}

multiversion! {
    /// The delta rule for one head and token. `state` is `[keys][values]`, row-major.
    ///
    /// Sweep 1, keys ascending: `S[k] *= alpha[k]`, `u += S[k] * key[k]`. Then `d = beta * (v - u)`.
    /// Sweep 2, keys ascending: `S[k] += key[k] * d`, `o += S[k] * query[k]`. Sums are fused multiply-adds from zero.
    pub(crate) unsafe fn delta_step(
        state: &mut [f32], query: &[f32], key: &[f32], alpha: &[f32], value: &[f32], beta: f32, out: &mut [f32],
    ) {
        let width = value.len();
        let whole = width / COLUMNS * COLUMNS;
        for c in (0..whole).step_by(COLUMNS) {
            columns::<COLUMNS>(state, width, c, query, key, alpha, value, beta, out);
        }
        for c in whole..width {
            columns::<1>(state, width, c, query, key, alpha, value, beta, out);
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn columns<const N: usize>(
    state: &mut [f32],
    width: usize,
    first: usize,
    query: &[f32],
    key: &[f32],
    alpha: &[f32],
    value: &[f32],
    beta: f32,
    out: &mut [f32],
) {
    let mut u = [0.0f32; N];
    for ((row, k), a) in state.chunks_exact_mut(width).zip(key).zip(alpha) {
        for (s, u) in row[first..first + N].iter_mut().zip(&mut u) {
            *s *= a;
            *u = s.mul_add(*k, *u);
        }
    }
    let mut d = [0.0f32; N];
    for ((d, v), u) in d.iter_mut().zip(&value[first..first + N]).zip(&u) {
        *d = beta * (v - u);
    }
    let mut o = [0.0f32; N];
    for ((row, k), q) in state.chunks_exact_mut(width).zip(key).zip(query) {
        for ((s, d), o) in row[first..first + N].iter_mut().zip(&d).zip(&mut o) {
            *s = k.mul_add(*d, *s);
            *o = s.mul_add(*q, *o);
        }
    }
    out[first..first + N].copy_from_slice(&o);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::testing::numbers;

    /// The recurrence in f64, written from the formula.
    #[test]
    fn delta_rule_follows_the_recurrence() {
        for (keys, width) in [(16, 16), (32, 33), (128, 128), (5, 70)] {
            let mut exact: Vec<f64> = numbers(1.0, keys * width, 1).iter().map(|&x| x as f64).collect();
            let start = numbers(1.0, keys * width, 1);
            let mut states: Vec<Vec<f32>> = Isa::available().iter().map(|_| start.clone()).collect();
            for t in 0..4 {
                let (q, k, v) = (
                    numbers(1.0, keys, 10 + t),
                    numbers(1.0, keys, 20 + t),
                    numbers(1.0, width, 30 + t),
                );
                let alpha: Vec<f32> = numbers(1.0, keys, 40 + t).iter().map(|x| 0.5 + 0.49 * x).collect();
                let beta = 0.7;
                let mut outs = vec![];
                for (isa, state) in Isa::available().into_iter().zip(&mut states) {
                    let mut out = vec![0.0; width];
                    // SAFETY: the form is available.
                    unsafe { delta_step(isa, state, &q, &k, &alpha, &v, beta, &mut out) };
                    outs.push(out);
                }
                for i in 0..keys {
                    (0..width).for_each(|j| exact[i * width + j] *= alpha[i] as f64);
                }
                let u: Vec<f64> = (0..width)
                    .map(|j| (0..keys).map(|i| exact[i * width + j] * k[i] as f64).sum())
                    .collect();
                for i in 0..keys {
                    (0..width).for_each(|j| exact[i * width + j] += k[i] as f64 * beta as f64 * (v[j] as f64 - u[j]));
                }
                for j in 0..width {
                    let o: f64 = (0..keys).map(|i| exact[i * width + j] * q[i] as f64).sum();
                    assert!(
                        (outs[0][j] as f64 - o).abs() < 1e-4 * (1.0 + o.abs()),
                        "{} for {o}",
                        outs[0][j]
                    );
                }
                for (out, state) in outs.iter().zip(&states) {
                    assert!(out.iter().zip(&outs[0]).all(|(a, b)| a.to_bits() == b.to_bits()));
                    assert!(state.iter().zip(&states[0]).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }

    #[test]
    fn convolution_and_decay() {
        let channels = 37;
        let taps = numbers(1.0, 4 * channels, 1);
        let rows: Vec<Vec<f32>> = (0..4).map(|i| numbers(1.0, channels, 2 + i)).collect();
        let inputs: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let (bias, rate) = (numbers(1.0, 36, 8), [1.0f32, 2.7]);
        let z = numbers(1.0, 36, 9);
        let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
        for isa in Isa::available() {
            let (mut y, mut a) = (vec![0.0; channels], z.clone());
            // SAFETY: the form is available.
            unsafe {
                conv_silu(isa, &taps, &inputs, &mut y);
                decay(isa, &mut a, &bias, &rate, -5.0);
            }
            for c in 0..channels {
                let s: f64 = (0..4).map(|j| taps[j * channels + c] as f64 * rows[j][c] as f64).sum();
                assert!((y[c] as f64 - s / (1.0 + (-s).exp())).abs() < 1e-6);
            }
            for c in 0..36 {
                let s = 1.0 / (1.0 + (-(rate[c / 18] as f64) * (z[c] + bias[c]) as f64).exp());
                assert!((a[c] as f64 - (-5.0 * s).exp()).abs() < 1e-6);
            }
            match &first {
                None => first = Some((y, a)),
                Some((y0, a0)) => {
                    assert!(
                        y.iter()
                            .zip(y0)
                            .chain(a.iter().zip(a0))
                            .all(|(p, q)| p.to_bits() == q.to_bits())
                    );
                }
            }
        }
    }
}
