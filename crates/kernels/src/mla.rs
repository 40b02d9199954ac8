//! Multi-head latent attention in the absorbed form: scores and values are taken straight from the cached latents.

// An index names a register of a tile; loops over it are unrolled.
#![allow(clippy::needless_range_loop)]

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

/// Heads that are taken through a block together, so that it comes from the second-level cache once for all of them.
pub(crate) const HEADS: usize = 8;

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
    let mut head = 0;
    while head < softmax.len() {
        let (softmax, queries, out) = (&mut softmax[head..], &queries[head * width..], &mut out[head * value..]);
        // SAFETY: the caller's promise.
        unsafe {
            match softmax.len() {
                HEADS.. => {
                    heads_block::<V, E, HEADS>(softmax, queries, width, block, scale, out, value);
                    head += HEADS;
                }
                2.. => {
                    heads_block::<V, E, 2>(softmax, queries, width, block, scale, out, value);
                    head += 2;
                }
                _ => {
                    heads_block::<V, E, 1>(softmax, queries, width, block, scale, out, value);
                    head += 1;
                }
            }
        }
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
    value: usize,
) {
    let mut scores = [[0.0f32; G]; ATTENTION_BLOCK];
    let scores = &mut scores[..block.len() / width];
    // Tiles of heads by positions (or by registers of outputs) whose sums fit into the registers.
    // SAFETY: the caller's promise.
    unsafe {
        match (G, V::REGISTERS) {
            (1, _) => all_scores::<V, E, G, 1, 4>(queries, width, block, scores),
            (2, 1) => all_scores::<V, E, G, 2, 4>(queries, width, block, scores),
            (_, 1) => all_scores::<V, E, G, 4, 4>(queries, width, block, scores),
            _ => all_scores::<V, E, G, 2, 3>(queries, width, block, scores),
        }
    }
    let keep = weigh(&mut softmax[..G], scale, scores);
    // SAFETY: the caller's promise.
    unsafe {
        match (G, V::REGISTERS) {
            (1, _) => all_values::<V, E, G, 1, 4>(scores, width, block, value, &keep, out),
            (2, 1) => all_values::<V, E, G, 2, 4>(scores, width, block, value, &keep, out),
            (_, 1) => all_values::<V, E, G, 4, 4>(scores, width, block, value, &keep, out),
            _ => all_values::<V, E, G, 2, 3>(scores, width, block, value, &keep, out),
        }
    }
}

/// Takes the scores of a block into the softmaxes, turns them into weights, and returns what former sums are multiplied by.
/// Heads go side by side, each in its own order.
#[inline(always)]
fn weigh<const G: usize>(softmax: &mut [Softmax], scale: f32, scores: &mut [[f32; G]]) -> [f32; G] {
    let before: [f32; G] = std::array::from_fn(|g| softmax[g].max);
    let mut max = before;
    for scores in scores.iter_mut() {
        for (score, max) in scores.iter_mut().zip(&mut max) {
            *score *= scale;
            *max = if *score > *max { *score } else { *max };
        }
    }
    let mut keep = [0.0; G];
    let mut sum = [0.0; G];
    for g in 0..G {
        keep[g] = exp(before[g] - max[g]);
        sum[g] = softmax[g].sum * keep[g];
    }
    for scores in scores.iter_mut() {
        for ((score, max), sum) in scores.iter_mut().zip(&max).zip(&mut sum) {
            *score = exp(*score - max);
            *sum += *score;
        }
    }
    for (g, softmax) in softmax.iter_mut().enumerate() {
        *softmax = Softmax {
            max: max[g],
            sum: sum[g],
        };
    }
    keep
}

/// Scores of `G` heads for all positions, in tiles of `H` heads and `P` positions.
#[inline(always)]
unsafe fn all_scores<V: Lanes, E: Element, const G: usize, const H: usize, const P: usize>(
    queries: &[f32],
    width: usize,
    block: &[E],
    scores: &mut [[f32; G]],
) {
    let mut p = 0;
    while p < scores.len() {
        let (rows, scores) = (&block[p * width..], &mut scores[p..]);
        // SAFETY: the caller's promise.
        unsafe {
            if scores.len() >= P {
                for head in (0..G).step_by(H) {
                    score_tile::<V, E, G, H, P>(queries, head, width, rows, scores);
                }
                p += P;
            } else {
                for head in (0..G).step_by(H) {
                    score_tile::<V, E, G, H, 1>(queries, head, width, rows, scores);
                }
                p += 1;
            }
        }
    }
}

/// Scores of `H` heads from `head` on for the first `P` rows. Each is `vector::dot`.
#[inline(always)]
unsafe fn score_tile<V: Lanes, E: Element, const G: usize, const H: usize, const P: usize>(
    queries: &[f32],
    head: usize,
    width: usize,
    rows: &[E],
    scores: &mut [[f32; G]],
) {
    let whole = width / LANES * LANES;
    let (queries, rows) = (&queries[head * width..(head + H) * width], &rows[..P * width]);
    // SAFETY: the caller's promise.
    let acc = unsafe {
        let mut acc = [[V::splat(0.0); P]; H];
        let (from, at) = (queries.as_ptr(), rows.as_ptr());
        for c in (0..whole).step_by(LANES) {
            // SAFETY (both loads): `c + LANES` is at most the width, and the slices hold H and P whole rows.
            let mut query = [V::splat(0.0); H];
            for h in 0..H {
                query[h] = V::load(&*from.add(h * width + c).cast());
            }
            for p in 0..P {
                let row: V = E::load(&*at.add(p * width + c).cast());
                for h in 0..H {
                    acc[h][p] = query[h].mul_add(row, acc[h][p]);
                }
            }
        }
        acc
    };
    for (h, acc) in acc.into_iter().enumerate() {
        for (p, acc) in acc.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            let mut lanes = unsafe { acc.store() };
            let query = &queries[h * width + whole..(h + 1) * width];
            let row = &rows[p * width + whole..(p + 1) * width];
            for ((lane, q), r) in lanes.iter_mut().zip(query).zip(row) {
                *lane = q.mul_add(r.number(), *lane);
            }
            scores[p][head + h] = tree(lanes);
        }
    }
}

/// The 16 numbers from `at` on.
#[inline(always)]
fn array<T>(x: &[T], at: usize) -> &[T; LANES] {
    x[at..at + LANES].as_array().expect("a slice of LANES numbers")
}

/// Weighted sums of `G` heads, in tiles of `H` heads and `C` times 16 outputs.
#[inline(always)]
unsafe fn all_values<V: Lanes, E: Element, const G: usize, const H: usize, const C: usize>(
    weights: &[[f32; G]],
    width: usize,
    block: &[E],
    value: usize,
    keep: &[f32; G],
    out: &mut [f32],
) {
    let mut first = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while first + C * LANES <= value {
            for head in (0..G).step_by(H) {
                value_tile::<V, E, G, H, C>(weights, head, width, block, first, value, keep, out);
            }
            first += C * LANES;
        }
        while first + LANES <= value {
            for head in (0..G).step_by(H) {
                value_tile::<V, E, G, H, 1>(weights, head, width, block, first, value, keep, out);
            }
            first += LANES;
        }
    }
    for i in first..value {
        for g in 0..G {
            let mut acc = out[g * value + i] * keep[g];
            for (weights, row) in weights.iter().zip(block.chunks_exact(width)) {
                acc = weights[g].mul_add(row[i].number(), acc);
            }
            out[g * value + i] = acc;
        }
    }
}

/// `C` times 16 outputs from `first` on of the weighted sums of `H` heads from `head` on.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn value_tile<V: Lanes, E: Element, const G: usize, const H: usize, const C: usize>(
    weights: &[[f32; G]],
    head: usize,
    width: usize,
    block: &[E],
    first: usize,
    value: usize,
    keep: &[f32; G],
    out: &mut [f32],
) {
    assert!(first + C * LANES <= value && value <= width && head + H <= G);
    let place = |h: usize, c: usize| (head + h) * value + first + c * LANES;
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(0.0); C]; H];
        for h in 0..H {
            for c in 0..C {
                acc[h][c] = V::load(array(out, place(h, c))).mul(V::splat(keep[head + h]));
            }
        }
        for (weights, row) in weights.iter().zip(block.chunks_exact(width)) {
            let mut weight = [V::splat(0.0); H];
            for h in 0..H {
                weight[h] = V::splat(weights[head + h]);
            }
            for c in 0..C {
                // SAFETY: `value` is at most the width, and this tile ends before it.
                let row: V = E::load(&*row.as_ptr().add(first + c * LANES).cast());
                for h in 0..H {
                    acc[h][c] = weight[h].mul_add(row, acc[h][c]);
                }
            }
        }
        for h in 0..H {
            for c in 0..C {
                out[place(h, c)..][..LANES].copy_from_slice(&acc[h][c].store());
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
        // So many heads that a full group, a pair and a single head are met; all have the same query and must agree.
        const ALL: usize = HEADS + 3;
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
