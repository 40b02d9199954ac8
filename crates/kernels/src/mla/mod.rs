//! Multi-head latent attention in the absorbed form: scores and values are taken straight from the cached latents.

mod scores;
mod values;

use crate::format::bf16_to_f32;
use crate::functions::exp;
use crate::isa::multiversion;
use crate::latents::ATTENTION_BLOCK;
use crate::registers::{Register, with_register};

/// Heads that are taken through a block together, so that it comes from the second-level cache once for all of them. More
/// would crowd the first-level cache, where their queries stay (6 x 576 x 4 B are 13.5 KiB): 12 took 2 %, 24 took 11 % longer.
const GROUP: usize = 6;
/// Heads of one task come in multiples of this, so that its register tiles are whole.
pub(crate) const HEADS: usize = 3;

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

/// Scores of a group of heads for the positions of a block, and then the weights that they become.
#[repr(C, align(64))]
struct Scores([[f32; ATTENTION_BLOCK]; GROUP]);

with_register! { R =>
    /// Takes one block of positions into the running softmaxes of some heads of one row.
    ///
    /// `queries` holds a query of the cache's width for each head; `rows` the block, `[positions, width]`; `ahead` what will be
    /// read next, which is asked for into the second-level cache meanwhile; `out` the weighted
    /// sums of the first numbers of each row, not yet divided, head after head. In order, for each head: all scores `<query,
    /// row> * scale`; the maximum with the running one; sum and `out` rescaled by `exp(old - new)`; then positions ascending
    /// `p = exp(score - max)`, `sum += p`, `out += p * row`. Heads are taken together only so that a row is loaded once for several.
    pub(crate) unsafe fn attend_block(
        softmax: &mut [Softmax],
        queries: &[f32],
        width: usize,
        rows: &[f32],
        ahead: &[u8],
        scale: f32,
        out: &mut [f32],
    ) {
        groups::<R>(softmax, queries, width, rows, ahead, scale, out)
    }
}

/// # Safety
/// The processor runs `V`.
#[inline(always)]
unsafe fn groups<V: Register>(
    softmax: &mut [Softmax],
    queries: &[f32],
    width: usize,
    rows: &[f32],
    ahead: &[u8],
    scale: f32,
    out: &mut [f32],
) {
    let value = out.len() / softmax.len();
    let mut scores = Scores([[0.0; ATTENTION_BLOCK]; GROUP]);
    let share = ahead.len().div_ceil(softmax.len().div_ceil(GROUP)).max(1);
    let mut ahead = ahead.chunks(share);
    let groups = softmax.chunks_mut(GROUP).zip(queries.chunks(GROUP * width));
    for ((softmax, queries), out) in groups.zip(out.chunks_mut(GROUP * value)) {
        // SAFETY: the caller's promise.
        unsafe { scores::scores::<V>(queries, width, rows, ahead.next().unwrap_or(&[]), &mut scores) }
        let keep = weigh(softmax, scale, rows.len() / width, &mut scores);
        // SAFETY: the caller's promise.
        unsafe { values::values::<V>(&scores, &keep[..softmax.len()], width, rows, out) }
    }
}

/// Takes the scores of a block into the softmaxes, turns them into weights, and returns what former sums are multiplied by.
#[inline(always)]
fn weigh(softmax: &mut [Softmax], scale: f32, positions: usize, scores: &mut Scores) -> [f32; GROUP] {
    let mut keep = [0.0; GROUP];
    let mut sum = [0.0; GROUP];
    for (g, (softmax, scores)) in softmax.iter_mut().zip(&mut scores.0).enumerate() {
        let scores = &mut scores[..positions];
        // The largest number is the same in any order.
        let mut max = [softmax.max; 16];
        let (sixteens, rest) = scores.as_chunks_mut::<16>();
        for scores in sixteens {
            for (score, max) in scores.iter_mut().zip(&mut max) {
                *score *= scale;
                *max = if *score > *max { *score } else { *max };
            }
        }
        for (score, max) in rest.iter_mut().zip(&mut max) {
            *score *= scale;
            *max = if *score > *max { *score } else { *max };
        }
        let max = max.into_iter().fold(softmax.max, |a, b| if b > a { b } else { a });
        for score in scores {
            *score = exp(*score - max);
        }
        keep[g] = exp(softmax.max - max);
        sum[g] = softmax.sum * keep[g];
        softmax.max = max;
    }
    // Side by side, because each sum is one chain.
    for t in 0..positions {
        for (sum, scores) in sum.iter_mut().zip(&scores.0) {
            *sum += scores[t];
        }
    }
    softmax.iter_mut().zip(sum).for_each(|(softmax, sum)| softmax.sum = sum);
    keep
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
mod tests;
