//! Multi-head latent attention in the absorbed form: scores and values are taken straight from the cached latents.

use crate::format::bf16_to_f32;
use crate::functions::exp;
use crate::isa::{Isa, multiversion};
use crate::lanes::{self, Lanes};
use crate::latents::{ATTENTION_BLOCK, Block};
use crate::matmul::{LANES, tree};

/// A stored number of a latent cache. Each is exact in f32, so what follows a load is the same for all.
trait Element: Copy {
    /// Sixteen numbers.
    ///
    /// # Safety
    /// The processor runs `V`.
    unsafe fn load<V: Lanes>(from: &[Self; LANES]) -> V;
    /// One number.
    fn number(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: &[Self; LANES]) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }
    #[inline(always)]
    fn number(self) -> f32 {
        self
    }
}

impl Element for u16 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: &[Self; LANES]) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(from) }
    }
    #[inline(always)]
    fn number(self) -> f32 {
        bf16_to_f32(self)
    }
}

/// The running softmax of one row and head over blocks of positions.
#[derive(Clone, Debug)]
pub(crate) struct Softmax {
    max: f32,
    sum: f32,
}

impl Softmax {
    pub(crate) fn new() -> Self {
        Self {
            max: f32::NEG_INFINITY,
            sum: 0.0,
        }
    }
}

/// Takes one block of positions into the running softmaxes of a few heads of one row.
///
/// `queries` holds a query of the cache's width for each head; `out` the weighted sums of the first numbers of each row,
/// not yet divided, head after head. In order, for each head: all scores `<query, row> * scale`; the maximum with the
/// running one; sum and `out` rescaled by `exp(old - new)`; then positions ascending `p = exp(score - max)`, `sum += p`,
/// `out += p * row`. Heads are taken together only so that a row of the cache is loaded once for several.
///
/// # Safety
/// The processor must run `isa`.
pub(crate) unsafe fn attend_block(
    isa: Isa,
    softmax: &mut [Softmax],
    queries: &[f32],
    width: usize,
    block: Block<'_>,
    scale: f32,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match block {
            Block::F32(rows) => attend_rows(isa, softmax, queries, width, rows, scale, out),
            Block::Bf16(rows) => attend_rows(isa, softmax, queries, width, rows, scale, out),
        }
    }
}

/// [`attend_block`] over rows of one format.
unsafe fn attend_rows<E: Element>(
    isa: Isa,
    softmax: &mut [Softmax],
    queries: &[f32],
    width: usize,
    block: &[E],
    scale: f32,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2<E: Element>(
        softmax: &mut [Softmax],
        queries: &[f32],
        width: usize,
        block: &[E],
        scale: f32,
        out: &mut [f32],
    ) {
        // SAFETY: this function has the features of its form.
        unsafe { groups::<lanes::x86::Avx2, E>(softmax, queries, width, block, scale, out) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    fn avx512<E: Element>(
        softmax: &mut [Softmax],
        queries: &[f32],
        width: usize,
        block: &[E],
        scale: f32,
        out: &mut [f32],
    ) {
        // SAFETY: this function has the features of its form.
        unsafe { groups::<lanes::x86::Avx512, E>(softmax, queries, width, block, scale, out) }
    }
    // SAFETY: the caller promises that the processor runs `isa`.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(softmax, queries, width, block, scale, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512(softmax, queries, width, block, scale, out),
            _ => groups::<[f32; LANES], E>(softmax, queries, width, block, scale, out),
        }
    }
}

/// Heads that are taken together.
const HEADS: usize = 4;
/// Positions whose scores are computed together: with four heads 16 running sums, which hide the latency of a multiply-add.
const POSITIONS: usize = 4;
/// Registers of 16 outputs that a head's weighted sum is computed for together.
const CHUNKS: usize = 4;

/// # Safety
/// The processor runs `V`; so for all functions below.
#[inline(always)]
unsafe fn groups<V: Lanes, E: Element>(
    softmax: &mut [Softmax],
    queries: &[f32],
    width: usize,
    block: &[E],
    scale: f32,
    out: &mut [f32],
) {
    let value = out.len() / softmax.len();
    let mut heads = softmax.chunks_exact_mut(HEADS);
    let mut queries = queries.chunks_exact(HEADS * width);
    let mut out = out.chunks_exact_mut(HEADS * value);
    for ((softmax, query), out) in (&mut heads).zip(&mut queries).zip(&mut out) {
        // SAFETY: the caller's promise.
        unsafe { heads_block::<V, E, HEADS>(softmax, query, width, block, scale, out) }
    }
    let rest = queries
        .remainder()
        .chunks_exact(width)
        .zip(out.into_remainder().chunks_exact_mut(value));
    for (softmax, (query, out)) in heads.into_remainder().chunks_exact_mut(1).zip(rest) {
        // SAFETY: the caller's promise.
        unsafe { heads_block::<V, E, 1>(softmax, query, width, block, scale, out) }
    }
}

#[inline(always)]
unsafe fn heads_block<V: Lanes, E: Element, const G: usize>(
    softmax: &mut [Softmax],
    queries: &[f32],
    width: usize,
    block: &[E],
    scale: f32,
    out: &mut [f32],
) {
    let positions = block.len() / width;
    let mut scores = [[0.0f32; ATTENTION_BLOCK]; G];
    let mut p = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while p + POSITIONS <= positions {
            score_tile::<V, E, G, POSITIONS>(queries, width, &block[p * width..], p, &mut scores);
            p += POSITIONS;
        }
        while p < positions {
            score_tile::<V, E, G, 1>(queries, width, &block[p * width..], p, &mut scores);
            p += 1;
        }
    }
    let mut keep = [0.0f32; G];
    for ((softmax, scores), keep) in softmax.iter_mut().zip(&mut scores).zip(&mut keep) {
        let scores = &mut scores[..positions];
        let mut max = softmax.max;
        for score in scores.iter_mut() {
            *score *= scale;
            max = if *score > max { *score } else { max };
        }
        *keep = exp(softmax.max - max);
        softmax.max = max;
        softmax.sum *= *keep;
        for score in scores.iter_mut() {
            *score = exp(*score - max);
        }
        for score in scores.iter() {
            softmax.sum += *score;
        }
    }
    let value = out.len() / G;
    let mut first = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while first + CHUNKS * LANES <= value {
            value_tile::<V, E, G, CHUNKS>(&scores, positions, width, block, first, value, &keep, out);
            first += CHUNKS * LANES;
        }
        while first + LANES <= value {
            value_tile::<V, E, G, 1>(&scores, positions, width, block, first, value, &keep, out);
            first += LANES;
        }
    }
    for i in first..value {
        for g in 0..G {
            let mut acc = out[g * value + i] * keep[g];
            for (p, row) in block.chunks_exact(width).enumerate() {
                acc = scores[g][p].mul_add(row[i].number(), acc);
            }
            out[g * value + i] = acc;
        }
    }
}

/// Scores of `G` heads for the first `P` rows of `rows`, into `scores[head][at..]`. Each is `vector::dot`.
#[inline(always)]
unsafe fn score_tile<V: Lanes, E: Element, const G: usize, const P: usize>(
    queries: &[f32],
    width: usize,
    rows: &[E],
    at: usize,
    scores: &mut [[f32; ATTENTION_BLOCK]; G],
) {
    let whole = width / LANES * LANES;
    // SAFETY: the caller's promise.
    let acc = unsafe {
        let mut acc = [[V::splat(0.0); P]; G];
        for c in (0..whole).step_by(LANES) {
            let mut row = [V::splat(0.0); P];
            for (p, row) in row.iter_mut().enumerate() {
                *row = E::load(array(rows, p * width + c));
            }
            for (g, acc) in acc.iter_mut().enumerate() {
                let query = V::load(array(queries, g * width + c));
                for (acc, row) in acc.iter_mut().zip(row) {
                    *acc = query.mul_add(row, *acc);
                }
            }
        }
        acc
    };
    for (g, acc) in acc.into_iter().enumerate() {
        for (p, acc) in acc.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            let mut lanes = unsafe { acc.store() };
            let query = &queries[g * width + whole..(g + 1) * width];
            let row = &rows[p * width + whole..(p + 1) * width];
            for ((lane, q), r) in lanes.iter_mut().zip(query).zip(row) {
                *lane = q.mul_add(r.number(), *lane);
            }
            scores[g][at + p] = tree(lanes);
        }
    }
}

/// The 16 numbers from `at` on.
#[inline(always)]
fn array<T>(x: &[T], at: usize) -> &[T; LANES] {
    x[at..at + LANES].as_array().expect("a slice of LANES numbers")
}

/// `C` times 16 outputs from `first` on of the weighted sums of `G` heads.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn value_tile<V: Lanes, E: Element, const G: usize, const C: usize>(
    weights: &[[f32; ATTENTION_BLOCK]; G],
    positions: usize,
    width: usize,
    block: &[E],
    first: usize,
    value: usize,
    keep: &[f32; G],
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(0.0); C]; G];
        for (g, acc) in acc.iter_mut().enumerate() {
            for (c, acc) in acc.iter_mut().enumerate() {
                *acc = V::load(array(out, g * value + first + c * LANES)).mul(V::splat(keep[g]));
            }
        }
        for p in 0..positions {
            let mut row = [V::splat(0.0); C];
            for (c, row) in row.iter_mut().enumerate() {
                *row = E::load(array(block, p * width + first + c * LANES));
            }
            for (acc, weights) in acc.iter_mut().zip(weights) {
                let w = V::splat(weights[p]);
                for (acc, row) in acc.iter_mut().zip(row) {
                    *acc = w.mul_add(row, *acc);
                }
            }
        }
        for (g, acc) in acc.into_iter().enumerate() {
            for (c, acc) in acc.into_iter().enumerate() {
                out[g * value + first + c * LANES..][..LANES].copy_from_slice(&acc.store());
            }
        }
    }
}

multiversion! {
    /// Divides the weighted sum by the softmax's sum.
    pub(crate) unsafe fn finish(softmax: &Softmax, out: &mut [f32]) {
        for o in out {
            *o /= softmax.sum;
        }
    }
}

multiversion! {
    /// `out[j] = sum_i x[i] * w[i][j]` over bf16 rows of `out.len()` numbers, rows ascending, fused multiply-adds from zero:
    /// the transposed product that absorbs the key projection into the query.
    pub(crate) unsafe fn transposed(w: &[u8], x: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        for (row, x) in w.chunks_exact(out.len() * 2).zip(x) {
            for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *o = bf16_to_f32(u16::from_le_bytes(*b)).mul_add(*x, *o);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::f32_to_bf16;
    use crate::latents::{KvFormat, Latents};
    use crate::testing::numbers;

    fn attend(isa: Isa, cache: &Latents, positions: usize, query: &[f32], scale: f32, value: usize) -> Vec<f32> {
        let width = query.len();
        // Six heads, so that a full group and single heads are met; all have the same query and must agree.
        const ALL: usize = HEADS + 2;
        let queries = query.repeat(ALL);
        let mut softmax = vec![Softmax::new(); ALL];
        let mut out = vec![0.0; ALL * value];
        for block in cache.blocks(positions) {
            // SAFETY: the form is available.
            unsafe { attend_block(isa, &mut softmax, &queries, width, block, scale, &mut out) };
        }
        for (softmax, out) in softmax.iter().zip(out.chunks_exact_mut(value)) {
            // SAFETY: the form is available.
            unsafe { finish(isa, softmax, out) };
        }
        assert!(out.chunks_exact(value).all(|head| head == &out[..value]));
        out.truncate(value);
        out
    }

    /// Rows as a cache of this format holds them.
    fn stored(format: KvFormat, rows: &[f32]) -> Vec<f32> {
        match format {
            KvFormat::F32 => rows.to_vec(),
            KvFormat::Bf16 => rows.iter().map(|x| bf16_to_f32(f32_to_bf16(*x))).collect(),
        }
    }

    fn filled(format: KvFormat, rows: &[f32], width: usize) -> Latents {
        let mut cache = Latents::new(width, format);
        rows.chunks_exact(width)
            .for_each(|row| cache.push(|new| new.copy_from_slice(row)));
        cache
    }

    #[test]
    fn blocks_give_the_softmax_and_do_not_depend_on_later_positions() {
        let (width, value, scale) = (45, 37, 0.3);
        let given = numbers(2.0, 300 * width, 1);
        let query = numbers(2.0, width, 2);
        for format in KvFormat::ALL {
            let rows = stored(format, &given);
            for t in [0, 1, 126, 127, 128, 129, 255, 256, 299] {
                let cache = filled(format, &given[..(t + 1) * width], width);
                let scores: Vec<f64> = (0..=t)
                    .map(|s| {
                        (0..width)
                            .map(|i| rows[s * width + i] as f64 * query[i] as f64)
                            .sum::<f64>()
                            * scale as f64
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                let got = attend(Isa::Plain, &cache, t + 1, &query, scale, value);
                for j in 0..value {
                    let exact: f64 = (0..=t)
                        .map(|s| (scores[s] - max).exp() / sum * rows[s * width + j] as f64)
                        .sum();
                    assert!(
                        (got[j] as f64 - exact).abs() < 2e-6,
                        "{format}, position {t}: {} for {exact}",
                        got[j]
                    );
                }
                let longer = filled(format, &given, width);
                for isa in Isa::available() {
                    assert_eq!(attend(isa, &cache, t + 1, &query, scale, value), got, "{isa}");
                    assert_eq!(attend(isa, &longer, t + 1, &query, scale, value), got, "{isa}");
                }
            }
        }
    }

    /// A bf16 cache gives the bits of an f32 cache that was given the rounded numbers.
    #[test]
    fn after_rounding_bf16_is_f32() {
        let (width, value) = (83, 83);
        let given = numbers(3.0, 150 * width, 5);
        let query = numbers(2.0, width, 6);
        let short = filled(KvFormat::Bf16, &given, width);
        let long = filled(KvFormat::F32, &stored(KvFormat::Bf16, &given), width);
        for isa in Isa::available() {
            let [a, b] = [&short, &long].map(|cache| attend(isa, cache, 150, &query, 0.2, value));
            assert_eq!(a, b, "{isa}");
        }
    }

    #[test]
    fn transposed_product() {
        let (n, k) = (19, 50);
        let w: Vec<u8> = numbers(2.0, n * k, 3)
            .iter()
            .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
            .collect();
        let x = numbers(2.0, n, 4);
        let at =
            |i: usize, j: usize| bf16_to_f32(u16::from_le_bytes([w[2 * (i * k + j)], w[2 * (i * k + j) + 1]])) as f64;
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut out = vec![0.0; k];
            // SAFETY: the form is available.
            unsafe { transposed(isa, &w, &x, &mut out) };
            for (j, o) in out.iter().enumerate() {
                let exact: f64 = (0..n).map(|i| at(i, j) * x[i] as f64).sum();
                assert!((*o as f64 - exact).abs() < 1e-4);
            }
            assert_eq!(first.get_or_insert(out.clone()), &out);
        }
    }
}
