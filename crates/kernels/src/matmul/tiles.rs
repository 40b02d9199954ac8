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

    /// Writes the exact f32 values of some blocks of one weight row, two lanes a block (even columns, odd columns).
    ///
    /// # Safety
    /// `out` holds two lanes for each block; `row` and `blocks` lie inside `w`, the last block may be partial.
    unsafe fn decode(w: &Matrix, row: usize, blocks: Range<usize>, out: &mut [Lane]);

    /// Adds `blocks` blocks to the partial sums of `TILE_OUTPUTS x rows` outputs: `acc[output * TILE_ROWS + row]`.
    ///
    /// # Safety
    /// `w` holds `TILE_OUTPUTS` rows at distance `w_stride`, `x` holds `rows <= TILE_ROWS` rows at distance `x_stride`,
    /// each of `2 * blocks` lanes.
    unsafe fn tile(
        w: *const Lane,
        w_stride: usize,
        x: *const Lane,
        x_stride: usize,
        blocks: usize,
        rows: usize,
        acc: &mut [Lane],
    );
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
    for first in (0..all_blocks).step_by(PANEL_BLOCKS) {
        let blocks = PANEL_BLOCKS.min(all_blocks - first);
        for (output, lanes) in outputs.clone().zip(panel.chunks_exact_mut(PANEL_BLOCKS * 2)) {
            // SAFETY: the caller's promise on `outputs`; the blocks lie within the row.
            unsafe { F::decode(w, output, first..first + blocks, &mut lanes[..2 * blocks]) }
        }
        for (t, sums) in sums.chunks_exact_mut(tile_lanes).enumerate() {
            let (row_tile, output_tile) = (t / output_tiles, t % output_tiles);
            let row = rows.start + row_tile * F::TILE_ROWS;
            let count = F::TILE_ROWS.min(rows.end - row);
            // SAFETY: the panel holds a multiple of TILE_OUTPUTS rows of PANEL_BLOCKS blocks (stale ones beyond the
            // outputs are computed and not stored); x holds `count` rows from `row` on, each with these blocks.
            unsafe {
                let w = panel.as_ptr().add(output_tile * F::TILE_OUTPUTS * PANEL_BLOCKS * 2);
                let x_row = x.row(row).as_ptr().add(2 * first);
                F::tile(w, PANEL_BLOCKS * 2, x_row, all_blocks * 2, blocks, count, sums);
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
