use super::{Lane, Output, Packed};
use crate::format::Matrix;
use std::ops::Range;

/// Blocks of 32 columns that one panel holds. With a tile's rows of activations they stay in the first-level cache.
const PANEL_BLOCKS: usize = 16;
/// Outputs of one panel: 128 KiB of decoded weights, which a row tile meets one after the other.
const PANEL_OUTPUTS: usize = 64;
/// Most activation rows that are taken through all columns together: their partial sums and one panel's columns stay in the
/// second-level cache (64 x 96 x 64 B + 96 x 2 KiB + 128 KiB = 0.7 MiB). A multiple of every form's tile.
const ROW_BLOCK: usize = 96;
/// Most activation rows of any form's tile.
const MAX_TILE_ROWS: usize = 6;

/// A vector form of the product. All functions need the processor feature of their form.
pub(super) trait Form {
    /// Up to this many rows weights are decoded in registers (`few`); beyond, into a panel.
    const FEW_ROWS: usize;
    /// Outputs of a register tile; divides `PANEL_OUTPUTS`.
    const TILE_OUTPUTS: usize;
    /// Activation rows of a register tile.
    const TILE_ROWS: usize;

    /// All of `outputs` for at most `FEW_ROWS` rows.
    ///
    /// # Safety
    /// As for `super::matmul`.
    unsafe fn few(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output);

    /// Writes the exact f32 values of some blocks of one weight row, two lanes a block (even columns, odd columns), to every
    /// `TILE_OUTPUTS`-th lane of `out`.
    ///
    /// # Safety
    /// `out` reaches to the last of these lanes; `row` and `blocks` lie inside `w`, the last block may be partial.
    unsafe fn decode(w: &Matrix, row: usize, blocks: Range<usize>, out: &mut [Lane]);

    /// Adds `lanes` lanes of columns to the partial sums of `TILE_OUTPUTS x rows` outputs, `acc[output * TILE_ROWS + row]`.
    ///
    /// # Safety
    /// `w` holds `lanes x TILE_OUTPUTS` lanes, `x` holds `lanes x rows` lanes, `rows <= TILE_ROWS`.
    unsafe fn tile(w: *const Lane, x: *const Lane, lanes: usize, rows: usize, acc: &mut [Lane]);
}

/// # Safety
/// As for `super::matmul`.
pub(super) unsafe fn matmul<F: Form>(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    if x.rows() <= F::FEW_ROWS {
        // SAFETY: the caller's promise.
        unsafe { F::few(w, outputs, x, y) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { many::<F>(w, outputs, x, y) }
    }
}

/// # Safety
/// As for `super::matmul`.
unsafe fn many<F: Form>(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    let panel_outputs = PANEL_OUTPUTS.min(outputs.len().next_multiple_of(F::TILE_OUTPUTS));
    let row_tiles = ROW_BLOCK.min(x.rows()).div_ceil(F::TILE_ROWS);
    let mut panel = vec![Lane::default(); panel_outputs * PANEL_BLOCKS * 2];
    let mut sums = vec![Lane::default(); panel_outputs * row_tiles * F::TILE_ROWS];
    for first in outputs.clone().step_by(panel_outputs) {
        let count = panel_outputs.min(outputs.end - first);
        for row in (0..x.rows()).step_by(ROW_BLOCK) {
            let rows = row..(row + ROW_BLOCK).min(x.rows());
            // SAFETY: the outputs stay below `outputs.end`, the rows below `x.rows()`.
            unsafe { block::<F>(w, first..first + count, rows, x, y, &mut panel, &mut sums) }
        }
    }
}

/// Up to `PANEL_OUTPUTS` outputs for up to `ROW_BLOCK` rows. `panel` and `sums` are scratch.
///
/// # Safety
/// As for `super::matmul`; `rows` lie inside `x`.
unsafe fn block<F: Form>(
    w: &Matrix,
    outputs: Range<usize>,
    rows: Range<usize>,
    x: &Packed,
    y: Output,
    panel: &mut [Lane],
    sums: &mut [Lane],
) {
    let all_blocks = x.row(0).len() / 2;
    let tile_lanes = F::TILE_OUTPUTS * F::TILE_ROWS;
    let output_tiles = outputs.len().div_ceil(F::TILE_OUTPUTS);
    let row_tiles = rows.len().div_ceil(F::TILE_ROWS);
    let sums = &mut sums[..output_tiles * row_tiles * tile_lanes];
    sums.fill(Lane::default());
    let mut x_tile = [Lane::default(); MAX_TILE_ROWS * PANEL_BLOCKS * 2];
    for first in (0..all_blocks).step_by(PANEL_BLOCKS) {
        let blocks = PANEL_BLOCKS.min(all_blocks - first);
        let w_tile = 2 * blocks * F::TILE_OUTPUTS;
        for (i, output) in outputs.clone().enumerate() {
            let tile = &mut panel[i / F::TILE_OUTPUTS * w_tile..][..w_tile];
            // SAFETY: the caller's promise on `outputs`; the blocks lie within the row; a tile holds all their lanes.
            unsafe { F::decode(w, output, first..first + blocks, &mut tile[i % F::TILE_OUTPUTS..]) }
        }
        for (row_tile, sums) in sums.chunks_exact_mut(output_tiles * tile_lanes).enumerate() {
            let row = rows.start + row_tile * F::TILE_ROWS;
            let count = F::TILE_ROWS.min(rows.end - row);
            for m in 0..count {
                let lanes = &x.row(row + m)[2 * first..][..2 * blocks];
                x_tile[m..]
                    .iter_mut()
                    .step_by(count)
                    .zip(lanes)
                    .for_each(|(to, from)| *to = *from);
            }
            for (w, sums) in panel.chunks_exact(w_tile).zip(sums.chunks_exact_mut(tile_lanes)) {
                // SAFETY: both tiles hold `2 * blocks` lanes for each of their rows (stale weights beyond the last
                // output are computed and not stored).
                unsafe { F::tile(w.as_ptr(), x_tile.as_ptr(), 2 * blocks, count, sums) }
            }
        }
    }
    for (t, sums) in sums.chunks_exact(tile_lanes).enumerate() {
        let (row_tile, output_tile) = (t / output_tiles, t % output_tiles);
        for (i, lanes) in sums.iter().enumerate() {
            let output = outputs.start + output_tile * F::TILE_OUTPUTS + i / F::TILE_ROWS;
            let row = rows.start + row_tile * F::TILE_ROWS + i % F::TILE_ROWS;
            if output < outputs.end && row < rows.end {
                // SAFETY: inside the outputs that the caller gave to this call.
                unsafe { y.set(row, output, super::tree(lanes.0)) }
            }
        }
    }
}
