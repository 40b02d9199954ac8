use super::{Lane, Output, Packed};
use crate::format::Matrix;
use std::ops::Range;

/// Blocks of 32 columns that one panel holds: with 8 outputs 16 KiB of decoded weights, which stay in the first-level
/// cache beside the activations of a tile.
const PANEL_BLOCKS: usize = 16;
/// Outputs of one panel.
const PANEL_OUTPUTS: usize = 8;

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
    let all_blocks = x.row(0).len() / 2;
    let row_tiles = x.rows().div_ceil(F::TILE_ROWS);
    let tile_lanes = F::TILE_OUTPUTS * F::TILE_ROWS;
    let tiles_a_panel = PANEL_OUTPUTS / F::TILE_OUTPUTS;
    let mut panel = vec![Lane::default(); PANEL_OUTPUTS * PANEL_BLOCKS * 2];
    let mut sums = vec![Lane::default(); tiles_a_panel * row_tiles * tile_lanes];
    for first in outputs.clone().step_by(PANEL_OUTPUTS) {
        let count = PANEL_OUTPUTS.min(outputs.end - first);
        sums.fill(Lane::default());
        for block in (0..all_blocks).step_by(PANEL_BLOCKS) {
            let blocks = PANEL_BLOCKS.min(all_blocks - block);
            for (i, row) in panel.chunks_exact_mut(PANEL_BLOCKS * 2).take(count).enumerate() {
                // SAFETY: `first + i` is below `outputs.end`, `block + blocks` within the row.
                unsafe { F::decode(w, first + i, block..block + blocks, &mut row[..2 * blocks]) }
            }
            for (t, sums) in sums.chunks_exact_mut(tile_lanes).enumerate() {
                let (row_tile, output_tile) = (t / tiles_a_panel, t % tiles_a_panel);
                let row = row_tile * F::TILE_ROWS;
                let rows = F::TILE_ROWS.min(x.rows() - row);
                // SAFETY: the panel holds PANEL_OUTPUTS rows of PANEL_BLOCKS blocks (stale ones beyond `count` are
                // computed and not stored); x holds `rows` rows from `row` on, each with `block + blocks` blocks.
                unsafe {
                    let w = panel.as_ptr().add(output_tile * F::TILE_OUTPUTS * PANEL_BLOCKS * 2);
                    let x_row = x.row(row).as_ptr().add(2 * block);
                    F::tile(w, PANEL_BLOCKS * 2, x_row, all_blocks * 2, blocks, rows, sums);
                }
            }
        }
        for (t, sums) in sums.chunks_exact(tile_lanes).enumerate() {
            let (row_tile, output_tile) = (t / tiles_a_panel, t % tiles_a_panel);
            for (i, lanes) in sums.iter().enumerate() {
                let output = output_tile * F::TILE_OUTPUTS + i / F::TILE_ROWS;
                let row = row_tile * F::TILE_ROWS + i % F::TILE_ROWS;
                if output < count && row < x.rows() {
                    // SAFETY: inside the outputs that the caller gave to this call.
                    unsafe { y.set(row, first + output, super::tree(lanes.0)) }
                }
            }
        }
    }
}
