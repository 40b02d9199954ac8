//! Scores of a group of heads: dot products of queries and cached rows in register tiles.

// An index names a register of a tile; loops over it are unrolled.
#![allow(clippy::needless_range_loop)]

use super::Scores;
use crate::aligned::LINE;
use crate::matmul::{LANES, Lane};
use crate::registers::{Register, TREES, prefetch};

/// Positions of a register tile.
const POSITIONS: usize = 4;
/// Most heads of a register tile.
const TILE: usize = 6;
/// The lanes of a tile's dot products, position by position for each head.
type Dots = [[Lane; TREES]; TILE * POSITIONS / TREES];

/// Sets the scores of the heads of `queries` for all rows, each `vector::dot`, not yet scaled; asks for `ahead` meanwhile.
///
/// # Safety
/// The processor runs `V`; so for all functions below.
#[inline(always)]
pub(super) unsafe fn scores<V: Register>(
    queries: &[f32],
    width: usize,
    rows: &[f32],
    ahead: &[u8],
    scores: &mut Scores,
) {
    let heads = queries.len() / width;
    let mut dots: Dots = Default::default();
    let mut p = 0;
    let share = ahead.len().div_ceil(rows.len().div_ceil(POSITIONS * width)).max(1);
    let mut ahead = ahead.chunks(share);
    // The rows of a tile stay in the first-level cache for all heads.
    for rows in rows.chunks(POSITIONS * width) {
        for line in ahead.next().unwrap_or(&[]).chunks(LINE) {
            prefetch(line.as_ptr());
        }
        let mut head = 0;
        while head < heads {
            let queries = &queries[head * width..];
            let to = &mut scores.0[head..];
            // Wide registers are so many that a tile takes twice the heads.
            // SAFETY: the caller's promise.
            head += unsafe {
                match (heads - head, rows.len() / width) {
                    (6.., POSITIONS) if V::WIDTH == LANES => {
                        tile::<V, 6, POSITIONS>(queries, rows, width, &mut dots, to, p)
                    }
                    (3.., POSITIONS) => tile::<V, 3, POSITIONS>(queries, rows, width, &mut dots, to, p),
                    (_, POSITIONS) => tile::<V, 1, POSITIONS>(queries, rows, width, &mut dots, to, p),
                    (3.., _) => each_row::<V, 3>(queries, rows, width, &mut dots, to, p),
                    _ => each_row::<V, 1>(queries, rows, width, &mut dots, to, p),
                }
            };
        }
        p += POSITIONS;
    }
}

/// The last few positions of a block, one at a time.
#[inline(always)]
unsafe fn each_row<V: Register, const H: usize>(
    queries: &[f32],
    rows: &[f32],
    width: usize,
    dots: &mut Dots,
    scores: &mut [[f32; super::ATTENTION_BLOCK]],
    first: usize,
) -> usize {
    for (p, row) in (first..).zip(rows.chunks_exact(width)) {
        // SAFETY: the caller's promise.
        unsafe { tile::<V, H, 1>(queries, row, width, dots, scores, p) };
    }
    H
}

/// Scores of `H` heads for `P` rows, the positions from `first` on; returns `H`.
#[inline(always)]
unsafe fn tile<V: Register, const H: usize, const P: usize>(
    queries: &[f32],
    rows: &[f32],
    width: usize,
    dots: &mut Dots,
    scores: &mut [[f32; super::ATTENTION_BLOCK]],
    first: usize,
) -> usize {
    let (queries, rows) = (&queries[..H * width], &rows[..P * width]);
    let lanes = dots.as_flattened_mut();
    let whole = width / LANES * LANES;
    // Lanes in registers, a register's part of the sixteen after the other.
    for part in (0..LANES).step_by(V::WIDTH) {
        // SAFETY: `c + V::WIDTH` stays within `whole`, and the slices hold H and P whole rows; a lane holds all parts.
        unsafe {
            let (queries, rows) = (queries.as_ptr().add(part), rows.as_ptr().add(part));
            let mut acc = [[V::splat(0.0); P]; H];
            for c in (0..whole).step_by(LANES) {
                let query = |h: usize| V::load(queries.add(h * width + c));
                let row = |p: usize| V::load(rows.add(p * width + c));
                // The fewer of the two kinds of operand stay in registers, the others pass through one.
                if H <= P {
                    let mut query_of = [V::splat(0.0); H];
                    for h in 0..H {
                        query_of[h] = query(h);
                    }
                    for p in 0..P {
                        let row = row(p);
                        for h in 0..H {
                            acc[h][p] = query_of[h].mul_add(row, acc[h][p]);
                        }
                    }
                } else {
                    let mut row_of = [V::splat(0.0); P];
                    for p in 0..P {
                        row_of[p] = row(p);
                    }
                    for h in 0..H {
                        let query = query(h);
                        for p in 0..P {
                            acc[h][p] = query.mul_add(row_of[p], acc[h][p]);
                        }
                    }
                }
            }
            for h in 0..H {
                for p in 0..P {
                    acc[h][p].store(lanes[h * P + p].0.as_mut_ptr().add(part));
                }
            }
        }
    }
    if whole < width {
        for h in 0..H {
            for p in 0..P {
                let query = &queries[h * width + whole..(h + 1) * width];
                let row = &rows[p * width + whole..(p + 1) * width];
                for ((lane, q), r) in lanes[h * P + p].0.iter_mut().zip(query).zip(row) {
                    *lane = q.mul_add(*r, *lane);
                }
            }
        }
    }
    let mut sums = [[0.0; TREES]; TILE * POSITIONS / TREES];
    for (sums, dots) in sums.iter_mut().zip(&*dots).take((H * P).div_ceil(TREES)) {
        // SAFETY: the caller's promise.
        *sums = unsafe { V::trees(dots) };
    }
    for (scores, sums) in scores.iter_mut().zip(sums.as_flattened().as_chunks::<P>().0).take(H) {
        scores[first..first + P].copy_from_slice(sums);
    }
    H
}
