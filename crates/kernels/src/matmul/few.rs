//! Few rows: weights are decoded in registers and met by all rows at once, so that each weight byte is read once.

// An index names a register of a tile; loops over it are unrolled.
#![allow(clippy::needless_range_loop)]

use super::form::{Form, Kind, Stored, block_at, last_block, part};
use super::{Lane, Output, PANEL_BLOCKS, PANEL_LANES, Packed};
use crate::aligned::LINE;
use crate::registers::prefetch;
use std::ops::Range;

/// Up to this many rows weights are decoded in registers; beyond, into a panel.
pub(super) const FEW_ROWS: usize = 6;
/// Outputs whose sums are kept while the columns are taken in parts.
const GROUP: usize = 64;
/// Lanes of activations, over all rows, that are taken through a group together: 14 KiB, less than half of the smallest
/// first-level cache, because the weights stream through it as well.
const PART_LANES: usize = 7 * PANEL_LANES;
/// Weights are asked for so many bytes ahead: the part of a row is too short for the processor's own prefetching.
const AHEAD_BYTES: usize = 8 << 10;
/// And so many outputs at least, all that are taken together.
const AHEAD: usize = 4;

/// All of `outputs` for at most `FEW_ROWS` rows.
///
/// # Safety
/// As for `super::matmul`, and the processor runs `F`.
#[inline(always)]
pub(super) unsafe fn few<F: Form, K: Kind>(w: Stored, outputs: Range<usize>, x: &Packed, y: Output) {
    // SAFETY: the caller's promise.
    unsafe {
        match x.rows() {
            0 => {}
            1 => rows::<F, K, 1>(w, outputs, x, y),
            2 => rows::<F, K, 2>(w, outputs, x, y),
            3 => rows::<F, K, 3>(w, outputs, x, y),
            4 => rows::<F, K, 4>(w, outputs, x, y),
            5 => rows::<F, K, 5>(w, outputs, x, y),
            _ => rows::<F, K, 6>(w, outputs, x, y),
        }
    }
}

/// # Safety
/// As for `few`, with `M` rows.
#[inline(always)]
unsafe fn rows<F: Form, K: Kind, const M: usize>(w: Stored, outputs: Range<usize>, x: &Packed, y: Output) {
    let mut sums = [[Lane::default(); M]; GROUP];
    let step = PART_LANES / (M * PANEL_LANES) * PANEL_BLOCKS;
    let all = w.whole() + usize::from(w.partial());
    let mut first = outputs.start;
    while first < outputs.end {
        let count = GROUP.min(outputs.end - first);
        let sums = &mut sums[..count];
        sums.fill([Lane::default(); M]);
        let mut from = 0;
        while from < all {
            let blocks = from..(from + step).min(all);
            // SAFETY: the outputs stay below `outputs.end`, the blocks below `all`.
            unsafe { part_of_group::<F, K, M>(w, first, blocks.clone(), x, sums) }
            from = blocks.end;
        }
        for (output, sums) in (first..).zip(&*sums) {
            for (row, lane) in sums.iter().enumerate() {
                // SAFETY: inside the outputs that the caller gave to this call.
                unsafe { y.set(row, output, K::scaled(w, output, F::tree(lane))) }
            }
        }
        first += count;
    }
}

/// Takes some blocks of columns into the sums of a group of outputs from `first` on.
///
/// # Safety
/// As for `rows`; the outputs and blocks lie inside `w`.
#[inline(always)]
unsafe fn part_of_group<F: Form, K: Kind, const M: usize>(
    w: Stored,
    first: usize,
    blocks: Range<usize>,
    x: &Packed,
    sums: &mut [[Lane; M]],
) {
    let count = sums.len();
    let all = w.whole() + usize::from(w.partial());
    // Far enough for memory's latency, in whole strips.
    let outputs_ahead = (AHEAD_BYTES / (blocks.len() * K::BYTES))
        .clamp(AHEAD, GROUP)
        .next_multiple_of(AHEAD);
    let mut n = 0;
    while n < count {
        // The same blocks of an output further on; beyond the group its next blocks, or the first ones of the next group.
        let (output, block) = match n + outputs_ahead {
            next if next < count => (first + next, blocks.start),
            next if blocks.end < all => (first + next % count, blocks.end),
            next => (first + next, 0),
        };
        let ahead = w.address::<K>(output, block);
        // As many outputs at once as their sums leave registers for weights, their decoding, and activations.
        // SAFETY: the caller's promise; `sums` has room for these outputs.
        unsafe {
            let sums = &mut sums[n..];
            let output = first + n;
            if sums.len() >= 4 && (F::PARTS == 1 || M == 1 && !K::HEAVY) {
                strip::<F, K, M, 4>(w, output, blocks.clone(), x, ahead, sums);
                n += 4;
            } else if sums.len() >= 2 && (F::PARTS == 1 || M <= 2) {
                strip::<F, K, M, 2>(w, output, blocks.clone(), x, ahead, sums);
                n += 2;
            } else {
                strip::<F, K, M, 1>(w, output, blocks.clone(), x, ahead, sums);
                n += 1;
            }
        }
    }
}

/// Takes `blocks` into the sums of `N` outputs from `output` on. `ahead` is an address to prefetch from.
///
/// # Safety
/// As for `part_of_group`; `sums` holds `N` outputs.
#[inline(always)]
unsafe fn strip<F: Form, K: Kind, const M: usize, const N: usize>(
    w: Stored,
    output: usize,
    blocks: Range<usize>,
    x: &Packed,
    ahead: *const u8,
    sums: &mut [[Lane; M]],
) {
    assert!(sums.len() >= N);
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[[F::zero(); M]; N]; 2];
        for p in 0..F::PARTS {
            for n in 0..N {
                for m in 0..M {
                    acc[p][n][m] = F::load(part::<F>(&raw const sums[n][m], p));
                }
            }
        }
        let whole = blocks.end.min(w.whole());
        let mut first = blocks.start;
        while first < whole {
            let panel = x.panel(first / PANEL_BLOCKS).as_ptr();
            for b in 0..PANEL_BLOCKS.min(whole - first) {
                let x = panel.add(2 * b);
                let at = (first + b - blocks.start) * K::BYTES;
                for n in 0..N {
                    if at % LINE < K::BYTES {
                        prefetch(ahead.wrapping_add(n * w.row_bytes() + at));
                    }
                    let from = block_at::<K>(w, output + n, first + b);
                    add::<F, K, M, N>(w, from, output + n, first + b, x, n, &mut acc);
                }
            }
            first += PANEL_BLOCKS;
        }
        if blocks.end > w.whole() {
            let whole = w.whole();
            let x = x.panel(whole / PANEL_BLOCKS).as_ptr().add(2 * (whole % PANEL_BLOCKS));
            for n in 0..N {
                let copy = last_block::<K>(w, output + n);
                add::<F, K, M, N>(w, copy.as_ptr(), output + n, whole, x, n, &mut acc);
            }
        }
        for p in 0..F::PARTS {
            for n in 0..N {
                for m in 0..M {
                    F::store(part::<F>(&raw const sums[n][m], p).cast_mut(), acc[p][n][m]);
                }
            }
        }
    }
}

/// Takes one block of one output into the sums of all rows.
///
/// # Safety
/// As for `strip`; `from` holds the block, `x` its two lanes for each row.
#[inline(always)]
unsafe fn add<F: Form, K: Kind, const M: usize, const N: usize>(
    w: Stored,
    from: *const u8,
    output: usize,
    block: usize,
    x: *const Lane,
    n: usize,
    acc: &mut [[[F::Reg; M]; N]; 2],
) {
    // SAFETY: the caller's promise.
    unsafe {
        for p in 0..F::PARTS {
            let [even, odd] = K::weights::<F>(w, from, output, block, p);
            for m in 0..M {
                let x = x.add(m * PANEL_LANES);
                acc[p][n][m] = F::fma(even, F::load(part::<F>(x, p)), acc[p][n][m]);
                acc[p][n][m] = F::fma(odd, F::load(part::<F>(x.add(1), p)), acc[p][n][m]);
            }
        }
    }
}
