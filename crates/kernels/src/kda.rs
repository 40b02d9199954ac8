//! Kimi Delta Attention, one token and head at a time: the recurrence, never a chunked form, so that a token's result
//! does not depend on how many tokens come with it.

// An index names a register of a tile; loops over it are unrolled.
#![allow(clippy::needless_range_loop)]

use crate::aligned::Aligned;
use crate::functions::{exp, sigmoid, silu};
use crate::isa::{Isa, multiversion};
use crate::matmul::LANES;
use crate::registers::{Register, prefetch, with_register};
use std::cell::Cell;

multiversion! {
    /// Depthwise causal convolution over time, then SiLU: `y[c] = silu(sum_j w[j][c] u[j][c])`, taps ascending, the last tap
    /// on the newest input. `taps` are K rows, `inputs` the K rows oldest first.
    pub(crate) unsafe fn conv_silu(taps: &[&[f32]], inputs: &[&[f32]], y: &mut [f32]) {
        y.fill(0.0);
        for (w, u) in taps.iter().zip(inputs) {
            for ((y, w), u) in y.iter_mut().zip(*w).zip(*u) {
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

/// What one token brings to one head's recurrence, and where its result goes.
pub(crate) struct Step<'a> {
    pub(crate) query: &'a [f32],
    pub(crate) key: &'a [f32],
    pub(crate) alpha: &'a [f32],
    pub(crate) value: &'a [f32],
    pub(crate) beta: f32,
    pub(crate) out: &'a mut [f32],
}

/// The delta rule for one head and consecutive tokens. `state` is `[keys][values]`.
///
/// For each token, sweep 1, keys ascending: `S[k] *= alpha[k]`, `u += S[k] * key[k]`. Then `d = beta * (v - u)`.
/// Sweep 2, keys ascending: `S[k] += key[k] * d`, `o += S[k] * query[k]`. Sums are fused multiply-adds from zero.
///
/// A column never meets another one, so that a few columns go through all tokens while they are in the first-level
/// cache. One pass over the keys is a token's sweep 2 and the next one's sweep 1.
///
/// # Safety
/// The processor must run `isa`.
pub(crate) unsafe fn delta(isa: Isa, state: &mut [f32], steps: &mut [Step]) {
    // SAFETY: the caller's promise.
    unsafe {
        match steps {
            [step] => one_token(isa, state, step),
            _ => tokens(isa, state, steps),
        }
    }
}

with_register! { R =>
    /// [`delta`] for several tokens.
    unsafe fn tokens(state: &mut [f32], steps: &mut [Step<'_>]) {
        all_columns::<R, { COLUMNS / R::WIDTH }>(state, steps)
    }
}

/// Columns that go through the tokens together. 32 columns of 128 keys are 16 KiB: with 64, which keep more sums in registers, the
/// first-level cache is crowded, and 64 tokens took about 5 % longer (AVX-512, one thread).
const COLUMNS: usize = 32;

/// Columns that one token's sweeps take together: a head's, as a rule.
const WIDE: usize = 256;

multiversion! {
    /// [`delta`] for one token, with whole rows of the state: it comes from memory, which is read fastest in its own order.
    unsafe fn one_token(state: &mut [f32], step: &mut Step<'_>) {
        let (keys, width) = (step.key.len(), step.value.len());
        assert!(state.len() == keys * width && step.out.len() == width);
        for first in (0..width).step_by(WIDE) {
            let columns = first..width.min(first + WIDE);
            let out = &mut step.out[columns.clone()];
            let mut sums = [0.0f32; WIDE];
            let sums = &mut sums[..out.len()];
            for ((row, key), alpha) in state.chunks_exact_mut(width).zip(step.key).zip(step.alpha) {
                for (s, u) in row[columns.clone()].iter_mut().zip(&mut *sums) {
                    *s *= alpha;
                    *u = s.mul_add(*key, *u);
                }
            }
            for (d, value) in sums.iter_mut().zip(&step.value[columns.clone()]) {
                *d = step.beta * (value - *d);
            }
            out.fill(0.0);
            for ((row, key), query) in state.chunks_exact_mut(width).zip(step.key).zip(step.query) {
                for ((s, d), o) in row[columns.clone()].iter_mut().zip(&*sums).zip(&mut *out) {
                    *s = key.mul_add(*d, *s);
                    *o = s.mul_add(*query, *o);
                }
            }
        }
    }
}

thread_local! {
    /// A thread's copy of a few columns of a state, kept from head to head.
    static STRIP: Cell<Aligned<f32>> = Cell::default();
}

/// Columns in groups of `C` registers, the rest one by one.
///
/// # Safety
/// The processor runs `V`; so for the functions below.
#[inline(always)]
unsafe fn all_columns<V: Register, const C: usize>(state: &mut [f32], steps: &mut [Step]) {
    let Some(step) = steps.first() else { return };
    let (keys, width) = (step.key.len(), step.value.len());
    assert!(state.len() == keys * width);
    assert!(
        steps
            .iter()
            .all(|s| [s.query, s.key, s.alpha].iter().all(|x| x.len() == keys)
                && [s.value, s.out].iter().all(|x| x.len() == width))
    );
    let mut strip = STRIP.take();
    if strip.len() < keys * C * V::WIDTH {
        strip = Aligned::zeros(keys * C * V::WIDTH);
    }
    let mut first = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while first + C * V::WIDTH <= width {
            columns::<V, C>(state, width, first, steps, &mut strip);
            first += C * V::WIDTH;
        }
        while first + V::WIDTH <= width {
            columns::<V, 1>(state, width, first, steps, &mut strip);
            first += V::WIDTH;
        }
    }
    STRIP.set(strip);
    for c in first..width {
        for step in &mut *steps {
            let (mut u, mut o) = (0.0, 0.0);
            for ((row, key), alpha) in state.chunks_exact_mut(width).zip(step.key).zip(step.alpha) {
                row[c] *= alpha;
                u = row[c].mul_add(*key, u);
            }
            let d = step.beta * (step.value[c] - u);
            for ((row, key), query) in state.chunks_exact_mut(width).zip(step.key).zip(step.query) {
                row[c] = key.mul_add(d, row[c]);
                o = row[c].mul_add(*query, o);
            }
            step.out[c] = o;
        }
    }
}

/// Asks for all of `x`.
#[inline(always)]
fn prefetch_all(x: &[f32]) {
    x.chunks(LANES).for_each(|line| prefetch(line.as_ptr()));
}

/// `C` registers of columns from `first` on. They live in `strip`, one piece of memory, between the first token's sweep 1
/// and the last one's sweep 2: where they lie in the state, rows of a power of two would crowd a few sets of the cache.
#[inline(always)]
unsafe fn columns<V: Register, const C: usize>(
    state: &mut [f32],
    width: usize,
    first: usize,
    steps: &mut [Step],
    strip: &mut [f32],
) {
    let keys = state.len() / width;
    assert!(first + C * V::WIDTH <= width && strip.len() >= keys * C * V::WIDTH);
    let (state, strip) = (state.as_mut_ptr(), strip.as_mut_ptr());
    // Where the next columns begin: in this state, or in the one that lies behind it.
    let ahead = match first + 2 * C * V::WIDTH <= width {
        true => state.wrapping_add(first + C * V::WIDTH),
        false => state.wrapping_add(keys * width),
    };
    // SAFETY: `all_columns` checked the lengths of steps; each address holds `C` registers, as checked above.
    unsafe {
        let in_state = |k: usize, c: usize| state.add(k * width + first + c * V::WIDTH);
        let in_strip = |k: usize, c: usize| strip.add((k * C + c) * V::WIDTH);
        let mut u = [V::splat(0.0); C];
        for (k, (key, alpha)) in steps[0].key.iter().zip(steps[0].alpha).enumerate() {
            let (key, alpha) = (V::splat(*key), V::splat(*alpha));
            for c in 0..C {
                let before = V::load(in_state(k, c)).mul(alpha);
                u[c] = before.mul_add(key, u[c]);
                before.store(in_strip(k, c));
            }
        }
        let tokens = steps.len();
        for t in 0..tokens {
            let (step, later) = steps[t..].split_first_mut().expect("a token below their number");
            let beta = V::splat(step.beta);
            let mut d = [V::splat(0.0); C];
            let mut o = [V::splat(0.0); C];
            for c in 0..C {
                let value = V::load(step.value.as_ptr().add(first + c * V::WIDTH));
                d[c] = beta.mul(value.sub(u[c]));
            }
            let sweep = step.key.iter().zip(step.query).enumerate();
            if let [next, later @ ..] = later {
                // Tokens lie far apart: what the next sweep begins with, and its result's place, would be waited for. So
                // would the next columns of the state, a share of which is asked for at each token.
                for c in 0..C {
                    prefetch(next.value.as_ptr().wrapping_add(first + c * V::WIDTH));
                    prefetch(next.out.as_ptr().wrapping_add(first + c * V::WIDTH));
                }
                if first == 0 {
                    prefetch_all(next.query);
                    if let [after, ..] = later {
                        prefetch_all(after.key);
                        prefetch_all(after.alpha);
                    }
                }
                for k in keys * t / (tokens - 1)..keys * (t + 1) / (tokens - 1) {
                    (0..C).for_each(|c| prefetch(ahead.wrapping_add(k * width + c * V::WIDTH)));
                }
                u = [V::splat(0.0); C];
                for ((k, (key, query)), (next_key, next_alpha)) in sweep.zip(next.key.iter().zip(next.alpha)) {
                    let (key, query) = (V::splat(*key), V::splat(*query));
                    let (next_key, next_alpha) = (V::splat(*next_key), V::splat(*next_alpha));
                    for c in 0..C {
                        let after = key.mul_add(d[c], V::load(in_strip(k, c)));
                        o[c] = after.mul_add(query, o[c]);
                        let before = after.mul(next_alpha);
                        u[c] = before.mul_add(next_key, u[c]);
                        before.store(in_strip(k, c));
                    }
                }
            } else {
                for (k, (key, query)) in sweep {
                    let (key, query) = (V::splat(*key), V::splat(*query));
                    for c in 0..C {
                        let after = key.mul_add(d[c], V::load(in_strip(k, c)));
                        o[c] = after.mul_add(query, o[c]);
                        after.store(in_state(k, c));
                    }
                }
            }
            for c in 0..C {
                o[c].store(step.out.as_mut_ptr().add(first + c * V::WIDTH));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// Runs tokens, each a query, key, alpha and value, and returns their results one after the other.
    fn run(isa: Isa, state: &mut [f32], tokens: &[[Vec<f32>; 4]], beta: f32) -> Vec<f32> {
        let mut all = vec![0.0; tokens.iter().map(|token| token[3].len()).sum()];
        let mut rest = &mut all[..];
        let mut steps = vec![];
        for [query, key, alpha, value] in tokens {
            let (out, others) = rest.split_at_mut(value.len());
            rest = others;
            steps.push(Step {
                query,
                key,
                alpha,
                value,
                beta,
                out,
            });
        }
        // SAFETY: the form is available.
        unsafe { delta(isa, state, &mut steps) };
        all
    }

    /// Tokens together give the bits of tokens one by one, in every form.
    #[test]
    fn tokens_together_and_one_by_one() {
        for (keys, width, tokens) in [(16, 16, 2), (7, 37, 5), (5, 70, 3), (128, 128, 9)] {
            let inputs: Vec<[Vec<f32>; 4]> = (0..tokens)
                .map(|t| {
                    let n = |len, seed| numbers(1.0, len, seed + 10 * t as u32);
                    [n(keys, 1), n(keys, 2), n(keys, 3), n(width, 4)]
                })
                .collect();
            let start = numbers(1.0, keys * width, 5);
            let mut want = start.clone();
            let one_by_one: Vec<f32> = inputs
                .iter()
                .flat_map(|token| run(Isa::Plain, &mut want, std::slice::from_ref(token), 0.3))
                .collect();
            for isa in Isa::available() {
                let mut state = start.clone();
                let out = run(isa, &mut state, &inputs, 0.3);
                let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same(&out, &one_by_one) && same(&state, &want), "{isa}, width {width}");
            }
        }
    }

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
                    let token = [&q, &k, &alpha, &v].map(Vec::clone);
                    outs.push(run(isa, state, &[token], beta));
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
                let taps: Vec<&[f32]> = taps.chunks_exact(channels).collect();
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
