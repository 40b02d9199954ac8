//! Weighted sums of cached rows for a group of heads, in register tiles.

// An index names a register of a tile; loops over it are unrolled.
#![allow(clippy::needless_range_loop)]

use super::{ATTENTION_BLOCK, Scores};
use crate::matmul::LANES;
use crate::registers::Register;

/// Registers of outputs of a tile.
const COLUMNS: usize = 4;

/// Multiplies the sums in `out`, `[heads, value]`, by `keep` of their head and adds the weighted rows, ascending.
///
/// # Safety
/// The processor runs `V`; so for the function below.
#[inline(always)]
pub(super) unsafe fn values<V: Register>(weights: &Scores, keep: &[f32], width: usize, rows: &[f32], out: &mut [f32]) {
    let (heads, value) = (keep.len(), out.len() / keep.len());
    assert!(value <= width);
    let mut first = 0;
    // The columns of a tile stay in the first-level cache for all heads.
    while first + V::WIDTH <= value {
        let wide = first + COLUMNS * V::WIDTH <= value;
        let mut head = 0;
        while head < heads {
            let (weights, keep) = (&weights.0[head..], &keep[head..]);
            let out = &mut out[head * value + first..];
            // SAFETY: the caller's promise; the columns end within `value`.
            head += unsafe {
                match (heads - head, wide) {
                    (6.., true) if V::WIDTH == LANES => {
                        tile::<V, 6, COLUMNS>(weights, keep, width, rows, first, value, out)
                    }
                    (3.., true) => tile::<V, 3, COLUMNS>(weights, keep, width, rows, first, value, out),
                    (_, true) => tile::<V, 1, COLUMNS>(weights, keep, width, rows, first, value, out),
                    (3.., false) => tile::<V, 3, 1>(weights, keep, width, rows, first, value, out),
                    (_, false) => tile::<V, 1, 1>(weights, keep, width, rows, first, value, out),
                }
            };
        }
        first += if wide { COLUMNS } else { 1 } * V::WIDTH;
    }
    for (out, (weights, keep)) in out.chunks_exact_mut(value).zip(weights.0.iter().zip(keep)) {
        for i in first..value {
            out[i] *= keep;
            for (weight, row) in weights.iter().zip(rows.chunks_exact(width)) {
                out[i] = weight.mul_add(row[i], out[i]);
            }
        }
    }
}

/// `C` registers of outputs, the columns from `first` on, for `H` heads; returns `H`. `out` begins at the first of them.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tile<V: Register, const H: usize, const C: usize>(
    weights: &[[f32; ATTENTION_BLOCK]],
    keep: &[f32],
    width: usize,
    rows: &[f32],
    first: usize,
    value: usize,
    out: &mut [f32],
) -> usize {
    let positions = rows.len() / width;
    assert!(weights.len() >= H && keep.len() >= H && positions <= ATTENTION_BLOCK);
    assert!(first + C * V::WIDTH <= width && (H - 1) * value + C * V::WIDTH <= out.len());
    // SAFETY: columns stay within a row of `width`, outputs within a head's, as checked above.
    unsafe {
        let place = |h: usize, c: usize| h * value + c * V::WIDTH;
        let mut acc = [[V::splat(0.0); C]; H];
        for h in 0..H {
            for c in 0..C {
                acc[h][c] = V::load(out.as_ptr().add(place(h, c))).mul(V::splat(keep[h]));
            }
        }
        let from = weights.as_ptr().cast::<f32>();
        for t in 0..positions {
            let row = rows.as_ptr().add(t * width + first);
            let row = |c: usize| V::load(row.add(c * V::WIDTH));
            let weight = |h: usize| V::splat(*from.add(h * ATTENTION_BLOCK + t));
            // The fewer of the two kinds of operand stay in registers, the others pass through one.
            if H <= C {
                let mut weight_of = [V::splat(0.0); H];
                for h in 0..H {
                    weight_of[h] = weight(h);
                }
                for c in 0..C {
                    let row = row(c);
                    for h in 0..H {
                        acc[h][c] = weight_of[h].mul_add(row, acc[h][c]);
                    }
                }
            } else {
                let mut row_of = [V::splat(0.0); C];
                for c in 0..C {
                    row_of[c] = row(c);
                }
                for h in 0..H {
                    let weight = weight(h);
                    for c in 0..C {
                        acc[h][c] = weight.mul_add(row_of[c], acc[h][c]);
                    }
                }
            }
        }
        for h in 0..H {
            for c in 0..C {
                acc[h][c].store(out.as_mut_ptr().add(place(h, c)));
            }
        }
    }
    H
}
