//! Many rows: weights are decoded once for a block of rows, into a panel of f32, and meet the activations in register tiles.

// An index names a register of a tile; loops over it are unrolled.
#![allow(clippy::needless_range_loop)]

use super::form::{Form, Kind, Stored, block_at, last_block, part};
use super::{Lane, Output, PANEL_BLOCKS, PANEL_LANES, Packed};
use std::cell::RefCell;
use std::ops::Range;

/// Outputs of one panel: 128 KiB of decoded weights, which a row tile meets one after the other.
const PANEL_OUTPUTS: usize = 64;
/// Most activation rows that are taken through all columns together: their partial sums and one panel's columns stay in the
/// second-level cache (64 x 96 x 64 B + 96 x 2 KiB + 128 KiB = 0.7 MiB).
const ROW_BLOCK: usize = 96;
/// Most activation rows of a register tile.
const TILE_ROWS: usize = 6;

/// A thread's memory for decoded weights and partial sums.
#[derive(Default)]
struct Scratch {
    /// `[output][PANEL_LANES]`.
    panel: Vec<Lane>,
    /// `[output][ROW_BLOCK]`.
    sums: Vec<Lane>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All of `outputs` for any number of rows.
///
/// # Safety
/// As for `super::matmul`, and the processor runs `F`.
#[inline(always)]
pub(super) unsafe fn many<F: Form, K: Kind>(w: Stored, outputs: Range<usize>, x: &Packed, y: Output) {
    let mut scratch = SCRATCH.take();
    scratch.panel.resize(PANEL_OUTPUTS * PANEL_LANES, Lane::default());
    scratch.sums.resize(PANEL_OUTPUTS * ROW_BLOCK, Lane::default());
    let mut first = outputs.start;
    while first < outputs.end {
        let panel = first..(first + PANEL_OUTPUTS).min(outputs.end);
        // Row blocks of equal size, so that none is left with a few rows.
        let blocks = x.rows().div_ceil(ROW_BLOCK);
        for i in 0..blocks {
            let rows = x.rows() * i / blocks..x.rows() * (i + 1) / blocks;
            // SAFETY: the outputs stay below `outputs.end`, the rows below `x.rows()`.
            unsafe { block::<F, K>(w, panel.clone(), rows, x, y, &mut scratch) }
        }
        first = panel.end;
    }
    SCRATCH.set(scratch);
}

/// Up to `PANEL_OUTPUTS` outputs for up to `ROW_BLOCK` rows.
///
/// # Safety
/// As for `many`; `rows` lie inside `x`.
#[inline(always)]
unsafe fn block<F: Form, K: Kind>(
    w: Stored,
    outputs: Range<usize>,
    rows: Range<usize>,
    x: &Packed,
    y: Output,
    Scratch { panel, sums }: &mut Scratch,
) {
    sums[..outputs.len() * ROW_BLOCK].fill(Lane::default());
    let all = w.whole() + usize::from(w.partial());
    let tiles = rows.len().div_ceil(TILE_ROWS);
    let mut first = 0;
    while first < all {
        let blocks = first..(first + PANEL_BLOCKS).min(all);
        for (i, output) in outputs.clone().enumerate() {
            // SAFETY: the output and the blocks lie inside `w`; a panel row holds them.
            unsafe {
                decode::<F, K>(
                    w,
                    output,
                    blocks.clone(),
                    panel[i * PANEL_LANES..][..PANEL_LANES].as_mut_ptr(),
                )
            }
        }
        let x = x.panel(first / PANEL_BLOCKS);
        for t in 0..tiles {
            let tile = rows.len() * t / tiles..rows.len() * (t + 1) / tiles;
            let x = x[(rows.start + tile.start) * PANEL_LANES..][..tile.len() * PANEL_LANES].as_ptr();
            let sums = sums[tile.start..].as_mut_ptr();
            let (w, lanes, n) = (panel.as_ptr(), 2 * blocks.len(), outputs.len());
            // SAFETY: all tiles lie inside the panel, the rows of `x` and the sums.
            unsafe {
                match tile.len() {
                    1 => sweep::<F, 1>(w, n, x, lanes, sums),
                    2 => sweep::<F, 2>(w, n, x, lanes, sums),
                    3 => sweep::<F, 3>(w, n, x, lanes, sums),
                    4 => sweep::<F, 4>(w, n, x, lanes, sums),
                    5 => sweep::<F, 5>(w, n, x, lanes, sums),
                    _ => sweep::<F, 6>(w, n, x, lanes, sums),
                }
            }
        }
        first = blocks.end;
    }
    for (output, sums) in outputs.zip(sums.chunks_exact(ROW_BLOCK)) {
        for (row, lane) in rows.clone().zip(sums) {
            // SAFETY: inside the outputs that the caller gave to this call.
            unsafe { y.set(row, output, K::scaled(w, output, F::tree(lane))) }
        }
    }
}

/// Writes the exact f32 values of some blocks of one weight row, two lanes a block (even columns, odd columns).
///
/// # Safety
/// As for `many`; `row` and `blocks` lie inside `w`, `out` has room.
#[inline(always)]
unsafe fn decode<F: Form, K: Kind>(w: Stored, row: usize, blocks: Range<usize>, mut out: *mut Lane) {
    // SAFETY: the caller's promise.
    unsafe {
        for block in blocks.start..blocks.end.min(w.whole()) {
            decode_block::<F, K>(w, block_at::<K>(w, row, block), row, block, out);
            out = out.add(2);
        }
        if blocks.end > w.whole() {
            let copy = last_block::<K>(w, row);
            decode_block::<F, K>(w, copy.as_ptr(), row, w.whole(), out);
        }
    }
}

/// # Safety
/// As for `decode`; `from` holds the block.
#[inline(always)]
unsafe fn decode_block<F: Form, K: Kind>(w: Stored, from: *const u8, row: usize, block: usize, out: *mut Lane) {
    // SAFETY: the caller's promise.
    unsafe {
        for p in 0..F::PARTS {
            let [even, odd] = K::weights::<F>(w, from, row, block, p);
            F::store(part::<F>(out, p).cast_mut(), even);
            F::store(part::<F>(out.add(1), p).cast_mut(), odd);
        }
    }
}

/// Takes `M` rows through `outputs` outputs of a panel.
///
/// # Safety
/// As for `tile`.
#[inline(always)]
unsafe fn sweep<F: Form, const M: usize>(
    w: *const Lane,
    outputs: usize,
    x: *const Lane,
    lanes: usize,
    sums: *mut Lane,
) {
    let mut n = 0;
    // SAFETY: the caller's promise.
    unsafe {
        if F::PARTS == 1 || M <= 3 {
            while n + 4 <= outputs {
                tile::<F, M, 4>(w.add(n * PANEL_LANES), x, lanes, sums.add(n * ROW_BLOCK));
                n += 4;
            }
        } else {
            while n + 2 <= outputs {
                tile::<F, M, 2>(w.add(n * PANEL_LANES), x, lanes, sums.add(n * ROW_BLOCK));
                n += 2;
            }
        }
        while n < outputs {
            tile::<F, M, 1>(w.add(n * PANEL_LANES), x, lanes, sums.add(n * ROW_BLOCK));
            n += 1;
        }
    }
}

/// Adds `lanes` lanes of columns to the partial sums of `N` outputs and `M` rows.
///
/// # Safety
/// `w` holds `N` rows of a panel, `x` holds `M` packed rows of it, `sums` `N` rows of `ROW_BLOCK`.
#[inline(always)]
unsafe fn tile<F: Form, const M: usize, const N: usize>(w: *const Lane, x: *const Lane, lanes: usize, sums: *mut Lane) {
    // SAFETY: the caller's promise.
    unsafe {
        for p in 0..F::PARTS {
            let mut acc = [[F::zero(); M]; N];
            for n in 0..N {
                for m in 0..M {
                    acc[n][m] = F::load(part::<F>(sums.add(n * ROW_BLOCK + m), p));
                }
            }
            for lane in 0..lanes {
                // The fewer of the two kinds of operand stay in registers, the others pass through one.
                if N <= M {
                    let mut weights = [F::zero(); N];
                    for n in 0..N {
                        weights[n] = F::load(part::<F>(w.add(n * PANEL_LANES + lane), p));
                    }
                    for m in 0..M {
                        let x = F::load(part::<F>(x.add(m * PANEL_LANES + lane), p));
                        for n in 0..N {
                            acc[n][m] = F::fma(weights[n], x, acc[n][m]);
                        }
                    }
                } else {
                    let mut inputs = [F::zero(); M];
                    for m in 0..M {
                        inputs[m] = F::load(part::<F>(x.add(m * PANEL_LANES + lane), p));
                    }
                    for n in 0..N {
                        let weight = F::load(part::<F>(w.add(n * PANEL_LANES + lane), p));
                        for m in 0..M {
                            acc[n][m] = F::fma(weight, inputs[m], acc[n][m]);
                        }
                    }
                }
            }
            for n in 0..N {
                for m in 0..M {
                    F::store(part::<F>(sums.add(n * ROW_BLOCK + m), p).cast_mut(), acc[n][m]);
                }
            }
        }
    }
}
