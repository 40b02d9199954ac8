//! Operations on one row: sums over a row run in 16 lanes (`lane = index mod 16`, ascending, then the tree), everything
//! else is element by element.

use crate::functions::{exp, sigmoid, situ as situ_one};
use crate::isa::multiversion;
use crate::matmul::{LANES, tree};

/// Most sources of a residual mix: one per closed block and the running sum.
pub const MAX_SOURCES: usize = 32;

/// Sum of `a[i] * b[i]`: lane `i mod 16`, ascending, fused multiply-adds from zero, then the tree.
#[inline(always)]
pub(crate) fn dot_body(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a16, a_rest) = a.as_chunks::<LANES>();
    let (b16, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a16.iter().zip(b16) {
        for l in 0..LANES {
            lanes[l] = a[l].mul_add(b[l], lanes[l]);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane = a.mul_add(*b, *lane);
    }
    tree(lanes)
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot_body(x, x) / x.len() as f32 + eps).sqrt()
}

multiversion! {
    /// `y = (x / rms(x)) * w` with `rms(x) = sqrt(mean(x^2) + eps)`.
    pub(crate) unsafe fn rms_norm(x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) {
        let r = inverse_rms(x, eps);
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            *y = (x * r) * w;
        }
    }
}

multiversion! {
    /// RMS norm of each head of `x` with one weight, times the sigmoid of the gate: `y = (x / rms(x)) * w * sigmoid(g)`.
    pub(crate) unsafe fn head_norm_gate(x: &[f32], w: &[f32], eps: f32, gate: &[f32], y: &mut [f32]) {
        let head = w.len();
        for ((x, g), y) in x.chunks_exact(head).zip(gate.chunks_exact(head)).zip(y.chunks_exact_mut(head)) {
            let r = inverse_rms(x, eps);
            for (((y, x), w), g) in y.iter_mut().zip(x).zip(w).zip(g) {
                *y = ((x * r) * w) * sigmoid(*g);
            }
        }
    }
}

multiversion! {
    /// Each head of `x` divided by its length, `x / sqrt(sum(x^2) + eps)`, then multiplied by `scale`.
    pub(crate) unsafe fn head_l2_norm(x: &mut [f32], head: usize, eps: f32, scale: f32) {
        for x in x.chunks_exact_mut(head) {
            let r = 1.0 / (dot_body(x, x) + eps).sqrt();
            for x in x {
                *x = (*x * r) * scale;
            }
        }
    }
}

multiversion! {
    /// Attention residual: `out = sum_i p_i v_i` over the raw sources, ascending; `p = softmax(<v_i, w> / rms(v_i))`.
    pub(crate) unsafe fn mix(sources: &[&[f32]], w: &[f32], eps: f32, out: &mut [f32]) {
        let mut p = [0.0f32; MAX_SOURCES];
        let p = &mut p[..sources.len()];
        let mut max = f32::NEG_INFINITY;
        for (p, v) in p.iter_mut().zip(sources) {
            *p = dot_body(v, w) * inverse_rms(v, eps);
            max = if *p > max { *p } else { max };
        }
        let mut sum = 0.0;
        for p in p.iter_mut() {
            *p = exp(*p - max);
            sum += *p;
        }
        out.fill(0.0);
        for (p, v) in p.iter().zip(sources) {
            let share = p / sum;
            for (o, v) in out.iter_mut().zip(*v) {
                *o = share.mul_add(*v, *o);
            }
        }
    }
}

multiversion! {
    /// SiTU-GLU element by element, into the gate's place.
    pub(crate) unsafe fn situ(gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = situ_one(*g, *u, beta, linear_beta);
        }
    }
}

multiversion! {
    /// `x *= sigmoid(gate)`.
    pub(crate) unsafe fn gate(x: &mut [f32], gate: &[f32]) {
        for (x, g) in x.iter_mut().zip(gate) {
            *x *= sigmoid(*g);
        }
    }
}

multiversion! {
    /// `x = sigmoid(x)`.
    pub(crate) unsafe fn sigmoid_all(x: &mut [f32]) {
        for x in x {
            *x = sigmoid(*x);
        }
    }
}

multiversion! {
    /// `x += y`.
    pub(crate) unsafe fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

multiversion! {
    /// `y = a * x + y`: one step of the combination of experts.
    pub(crate) unsafe fn add_scaled(y: &mut [f32], a: f32, x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = a.mul_add(*x, *y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::testing::numbers;

    /// Runs `f` under every form and compares the bits.
    fn same_bits(f: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
        let want = f(Isa::Plain);
        for isa in Isa::available() {
            let got = f(isa);
            assert!(
                got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{isa} differs"
            );
        }
        want
    }

    fn close(got: &[f32], exact: impl Iterator<Item = f64>) {
        for (i, (g, e)) in got.iter().zip(exact).enumerate() {
            assert!(
                (*g as f64 - e).abs() <= 1e-5 * e.abs().max(1.0),
                "element {i}: {g} for {e}"
            );
        }
    }

    #[test]
    fn norms_and_gates() {
        for n in [1, 16, 31, 96, 257] {
            let (x, w, g) = (numbers(2.0, n, 1), numbers(2.0, n, 2), numbers(2.0, n, 3));
            let mean: f64 = x.iter().map(|x| (*x as f64).powi(2)).sum::<f64>() / n as f64;
            let sig = |g: f32| 1.0 / (1.0 + (-g as f64).exp());
            // SAFETY (all calls below): the form is available.
            let y = same_bits(|isa| {
                let mut y = vec![0.0; n];
                // SAFETY: the form is available.
                unsafe { rms_norm(isa, &x, &w, 1e-5, &mut y) };
                y
            });
            close(
                &y,
                x.iter()
                    .zip(&w)
                    .map(|(x, w)| *x as f64 * *w as f64 / (mean + 1e-5).sqrt()),
            );
            let y = same_bits(|isa| {
                let mut y = vec![0.0; n];
                // SAFETY: the form is available.
                unsafe { head_norm_gate(isa, &x, &w, 1e-5, &g, &mut y) };
                y
            });
            close(
                &y,
                (0..n).map(|i| x[i] as f64 * w[i] as f64 / (mean + 1e-5).sqrt() * sig(g[i])),
            );
            let y = same_bits(|isa| {
                let mut y = x.clone();
                // SAFETY: the form is available.
                unsafe { head_l2_norm(isa, &mut y, n, 1e-6, 0.5) };
                y
            });
            close(&y, x.iter().map(|x| *x as f64 * 0.5 / (mean * n as f64 + 1e-6).sqrt()));
            let y = same_bits(|isa| {
                let mut y = x.clone();
                // SAFETY: the form is available.
                unsafe { gate(isa, &mut y, &g) };
                y
            });
            close(&y, x.iter().zip(&g).map(|(x, g)| *x as f64 * sig(*g)));
        }
    }

    #[test]
    fn mix_is_a_softmax_over_raw_sources() {
        let n = 77;
        let sources = [numbers(2.0, n, 4), numbers(2.0, n, 5), numbers(2.0, n, 6)];
        let w = numbers(2.0, n, 7);
        let refs: Vec<&[f32]> = sources.iter().map(Vec::as_slice).collect();
        let y = same_bits(|isa| {
            let mut y = vec![0.0; n];
            // SAFETY: the form is available.
            unsafe { mix(isa, &refs, &w, 1e-5, &mut y) };
            y
        });
        let score = |v: &[f32]| {
            let mean = v.iter().map(|x| (*x as f64).powi(2)).sum::<f64>() / n as f64;
            v.iter().zip(&w).map(|(v, w)| *v as f64 * *w as f64).sum::<f64>() / (mean + 1e-5).sqrt()
        };
        let e: Vec<f64> = sources.iter().map(|v| score(v).exp()).collect();
        let sum: f64 = e.iter().sum();
        close(
            &y,
            (0..n).map(|i| (0..3).map(|s| e[s] / sum * sources[s][i] as f64).sum()),
        );
    }

    #[test]
    fn element_wise_operations() {
        let n = 45;
        let (g, u) = (numbers(2.0, n, 8), numbers(2.0, n, 9));
        let y = same_bits(|isa| {
            let mut y = g.clone();
            // SAFETY: the form is available.
            unsafe {
                situ(isa, &mut y, &u, 4.0, 25.0);
                add(isa, &mut y, &g);
                add_scaled(isa, &mut y, 0.25, &u);
                sigmoid_all(isa, &mut y);
            }
            y
        });
        close(
            &y,
            (0..n).map(|i| {
                let v = situ_one(g[i], u[i], 4.0, 25.0) as f64 + g[i] as f64 + 0.25 * u[i] as f64;
                1.0 / (1.0 + (-v).exp())
            }),
        );
    }
}
